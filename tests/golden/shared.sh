#!/bin/sh
# Runs ../shared/check_model.py on the files of one reference model, when it is there, and on the file that engraft makes of
# its Hugging Face folder, with fused operators and with their bodies, and structure.py and consumers.py on all of them; it is unpacked once.
# usage: shared.sh ENGRAFT SHARED WORK MODEL     exit 77 = skipped
set -eu
engraft=$1 shared=$2 work=$3 model=$4
if ! [ -f "$shared/check_model.py" ] || ! [ -f "$shared/models/$model.tar.xz" ] || ! command -v python3 >/dev/null; then
  echo "skipped golden/$model: no references or no python3"
  exit 77
fi
mkdir -p "$work"
[ -d "$work/$model" ] || tar -xf "$shared/models/$model.tar.xz" -C "$work"
status=0
if [ -d "$work/$model/hf" ]; then
  "$engraft" new --weights "$work/$model/hf" -o "$work/$model/model.new-float32.onnx" || status=1
fi
# Files with float16 embeddings and norms may miss the limit on adapters after ten steps, and nothing else: the references
# keep these weights in float32, and PyTorch with them rounded is as far away.
judge() {
  file=$1
  shift
  line=$(python3 "$shared/check_model.py" "$engraft" "$work" --only "$model/$(basename "$file")" "$@") && {
    echo "$line"
    return 0
  }
  echo "$line"
  case $file in *-float16.onnx | *-int4-cuda.onnx) ;; *) return 1 ;; esac
  echo "$line" | grep -Eq '^FALLS SHORT [^ ]+ train final adapters 1\.[0-9]e-02$'
}
for file in "$work/$model"/model.*.onnx; do
  [ -f "$file" ] || continue
  judge "$file" || status=1
  judge "$file" --more --no-fuse || status=1
done
python3 "$(dirname "$0")/structure.py" "$engraft" "$work/structure-$model" "$work/$model" || status=1
if [ -d "$work/$model/hf" ]; then
  python3 "$(dirname "$0")/consumers.py" "$engraft" "$work/consumers-$model" "$work/$model" || [ $? -eq 77 ] || status=1
fi
exit $status
