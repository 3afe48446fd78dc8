#!/bin/sh
# The command line from outside: exit codes, one line on stderr for each mistake, files that are written and files that are
# left alone, the log's format, a run that is interrupted.
# usage: run.sh ENGRAFT
set -u
engraft=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
[ -x "$engraft" ] || { echo "$1 is no program"; exit 1; }
work=$(mktemp -d "${TMPDIR:-/tmp}/engraft-cli-XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
failures=0 checks=0

fail() { failures=$((failures + 1)); echo "FAILED: $*"; }

# bad CODE TEXT COMMAND…: the exit code, one line on stderr, and TEXT in it
bad() {
  code=$1 text=$2
  shift 2
  checks=$((checks + 1))
  "$engraft" "$@" >out 2>err </dev/null
  got=$?
  [ "$got" -eq "$code" ] || fail "exit $got, not $code: $*: $(cat err)"
  [ "$(wc -l <err)" -eq 1 ] || fail "$(wc -l <err) lines on stderr: $*: $(cat err)"
  grep -qF -e "$text" err || fail "stderr does not name '$text': $*: $(cat err)"
}

# good COMMAND…: exit code 0, nothing on stderr
good() {
  checks=$((checks + 1))
  "$engraft" "$@" >out 2>err </dev/null || fail "exit $?: $*: $(cat err)"
  [ ! -s err ] || fail "stderr is not empty: $*: $(cat err)"
}

there() { checks=$((checks + 1)); [ -s "$1" ] || fail "$1 was not written"; }
absent() { checks=$((checks + 1)); [ ! -e "$1" ] || fail "$1 was written"; }
holds() { checks=$((checks + 1)); grep -qE -e "$2" "$1" || fail "$1 does not hold $2: $(head -n 3 "$1")"; }

cat >config.json <<'END'
{"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
 "num_key_value_heads": 2, "vocab_size": 256, "tie_word_embeddings": true, "rms_norm_eps": 1e-5, "hidden_act": "silu",
 "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
END
good new --config config.json --random-weights 1 --dtype f32 -o model.onnx
there model.onnx
printf '{"input_ids":[1,2,3,4,5,6,7,8]}\n{"input_ids":[9,8,7,6],"prompt_length":2}\n' >data.jsonl

good train --help
holds out '^  --rank N  \(16\)$'

# ---- wrong usage: 2 ----
bad 2 'usage: engraft'
bad 2 'frobnicate' frobnicate
bad 2 'MODEL is missing' inspect
bad 2 '--frob' inspect model.onnx --frob
bad 2 'second' inspect model.onnx second
bad 2 '--out is missing' train model.onnx --data data.jsonl
bad 2 '--data and --text' train model.onnx --out run
bad 2 '--data and --text' train model.onnx --out run --data data.jsonl --text data.jsonl
bad 2 '--rank needs a value' train model.onnx --out run --data data.jsonl --rank
bad 2 '--rank "x"' train model.onnx --out run --data data.jsonl --rank x
bad 2 '--rank "-1"' train model.onnx --out run --data data.jsonl --rank -1
bad 2 '--lr "1e"' train model.onnx --out run --data data.jsonl --lr 1e
bad 2 '--lr "nan"' train model.onnx --out run --data data.jsonl --lr nan
bad 2 '--tokens "99999999999999999999"' train model.onnx --out run --data data.jsonl --tokens 99999999999999999999
bad 2 '--schedule "square" is not one of constant' train model.onnx --out run --data data.jsonl --schedule square
bad 2 '--steps and --epochs' train model.onnx --out run --data data.jsonl --steps 1 --epochs 1
bad 2 '--full takes no value' train model.onnx --out run --data data.jsonl --full=1
bad 2 '--inputs is missing' run model.onnx --outputs o.safetensors
bad 2 '-o is missing' rewrite model.onnx
bad 2 '--prompt and --prompt-ids' generate model.onnx
bad 2 '--format' export model.onnx --adapter run -o other
bad 2 '--random-weights is missing' new --config config.json -o other.onnx
printf '{"learning_rate": 1}' >settings.json
bad 2 'learning_rate' train model.onnx --data data.jsonl --out run --config settings.json
printf '{"rank": {"a": 1}}' >settings.json
bad 2 'rank' train model.onnx --data data.jsonl --out run --config settings.json

# ---- options of other versions: named, never ignored ----
for option in '--loss dpo' '--neftune 5'; do
  # shellcheck disable=SC2086 # option and value
  bad 1 "$option is not in this version" train model.onnx --data data.jsonl --out run $option
done
bad 1 'int4 in blocks of 48 numbers' train model.onnx --data data.jsonl --out run --qat int4 --qat-block 48
bad 1 'no parameter of experts is named "a.b": the model has no experts' train model.onnx --data data.jsonl --out run \
  --target-parameters a.b
bad 1 'no linear layer is named "x"' train model.onnx --data data.jsonl --out run --exclude x
bad 1 'the regular expression "(q"' train model.onnx --data data.jsonl --out run --targets '(q'
bad 1 'rank pattern: "q_proj" is not NAME=NUMBER' train model.onnx --data data.jsonl --out run --rank-pattern q_proj
bad 1 'no adapter is named "lm_head"' train model.onnx --data data.jsonl --out run --alpha-pattern lm_head=3
bad 1 'report' report model.onnx
bad 2 '--weights and --random-weights' new --config config.json --weights . --random-weights 1 -o other.onnx
bad 2 '--config is missing' new --random-weights 1 -o other.onnx

# ---- devices ----
good devices
grep -q '^cpu ' out || fail "devices does not list the processor: $(cat out)"
good devices --json
grep -q '"device": "cuda"' out || fail "devices --json says nothing of cuda: $(cat out)"
(
  CUDA_VISIBLE_DEVICES=''
  export CUDA_VISIBLE_DEVICES # no device is left, wherever this runs
  bad 1 'engraft: ' train model.onnx --data data.jsonl --out run --device cuda
  grep -qE 'CUDA|NVIDIA' err || fail "nothing of CUDA: $(cat err)"
) || exit 1

# ---- packed documents ----
printf '{"input_ids":[1,2,3]}\n{"input_ids":[4,5,6,7,8]}\n{"input_ids":[9]}\n{"input_ids":[10,11]}\n' >packed.jsonl
packed_loss=
for option in '--pack bfd' '--pack sequential' '--pack off --accumulate 2' '--packing-cache rebuild' \
  '--packing-cache readback'; do
  # shellcheck disable=SC2086 # options and values
  good train model.onnx --data packed.jsonl --out packed --tokens 11 --steps 1 --log packed.log $option
  loss=$(sed -n 's/.*"loss":\([0-9.]*\),.*"tokens":11,.*/\1/p' packed.log | cut -c 1-6)
  [ -n "$loss" ] && [ "$loss" = "${packed_loss:-$loss}" ] || fail "loss \"$loss\", not $packed_loss: $option"
  packed_loss=$loss
done

# ---- bad files ----
bad 1 'missing.onnx' inspect missing.onnx
printf 'not a model' >broken.onnx
bad 1 'broken.onnx' inspect broken.onnx
head -c 2000 model.onnx >short.onnx
bad 1 'short.onnx' train short.onnx --data data.jsonl --out run
bad 1 'nodes' inspect model.onnx --max-nodes 3
bad 1 'missing.jsonl' train model.onnx --data missing.jsonl --out run
line() { printf '{"input_ids":[1,2]}\n%s\n' "$2" >bad.jsonl; bad 1 "$1" train model.onnx --data bad.jsonl --out run; }
line 'bad.jsonl line 2: not a JSON object' '[1,2]'
line 'line 2: no "input_ids"' '{"text":"x"}'
line 'line 2: "input_ids" is empty' '{"input_ids":[]}'
line 'line 2: "input_ids" holds -1' '{"input_ids":[-1]}'
line 'line 2: 1 labels for 2 input_ids' '{"input_ids":[1,2],"labels":[1]}'
line 'line 2: "prompt_length" 3' '{"input_ids":[1,2],"prompt_length":3}'
line '--loss dpo' '{"chosen":[1],"rejected":[2]}'
line 'document 2, position 2: token 256 is outside the vocabulary of 256' '{"input_ids":[1,256]}'
line 'document 2, position 2: label 300' '{"input_ids":[1,2],"labels":[1,300]}'
line 'line 2: string without an end' '{"input_ids":[1],"x":"'
: >empty.jsonl
bad 1 'empty.jsonl: the file has no documents' train model.onnx --data empty.jsonl --out run
bad 1 'empty.jsonl: the file is empty' train model.onnx --text empty.jsonl --out run
bad 1 'not a regular file' train model.onnx --data . --out run
printf '{"rank": 4' >settings.json
bad 1 'settings.json' train model.onnx --data data.jsonl --out run --config settings.json
bad 1 'nonsense' train model.onnx --data data.jsonl --out run --targets q_proj,nonsense
bad 1 'tokens' train model.onnx --data data.jsonl --out run --tokens 0
bad 1 '--steps 0' train model.onnx --data data.jsonl --out run --steps 0
bad 1 '--betas' train model.onnx --data data.jsonl --out run --betas 0.9
bad 1 '--memory-budget' train model.onnx --data data.jsonl --out run --memory-budget lots
bad 1 '--host-budget' train model.onnx --data data.jsonl --out run --host-budget lots
bad 2 '--checkpoint' train model.onnx --data data.jsonl --out run --checkpoint some
bad 1 'budget of 1024 bytes' train model.onnx --data data.jsonl --out run --memory-budget 1K
bad 1 'adapter_config.json' train model.onnx --data data.jsonl --out run --init-adapter missing
bad 1 'no pass named "squeeze_all"' rewrite model.onnx -o other.onnx --passes squeeze_all
bad 1 'prompt position 1' generate model.onnx --prompt-ids 999
bad 1 '--prompt-ids: "x"' generate model.onnx --prompt-ids 1,x
printf '{"model_type": "mamba"}' >other.json
bad 1 'mamba' new --config other.json --random-weights 1 -o other.onnx
printf '{"model_type": "llama", "hidden_size": 16}' >other.json
bad 1 'intermediate_size' new --config other.json --random-weights 1 -o other.onnx
bad 1 'neither model.safetensors nor' new --config config.json --weights . -o other.onnx
absent run
absent other.onnx

# ---- training ----
good train model.onnx --data data.jsonl --out run --rank 4 --alpha 8 --steps 4 --lr 1e-2 --tokens 16 --log log.jsonl \
  --dump-gradients gradients.safetensors --save-every 1 --keep 2 --eval-data data.jsonl --eval-every 2 --threads 2
for file in run/adapter_model.safetensors run/adapter_config.json run/checkpoint-4/adapter_config.json \
  run/checkpoint-3/adapter_model.safetensors gradients.safetensors; do there $file; done
absent run/checkpoint-2
holds log.jsonl '^\{"step":1,"loss":[0-9.e-]+,"lr":0\.01,"grad_norm":[0-9.e-]+,"tokens":12,"targets":9,"tokens_per_s":[0-9.]+\}$'
holds log.jsonl '^\{"step":4,"eval_loss":[0-9.e-]+\}$'
[ "$(grep -c '"loss"' log.jsonl)" -eq 4 ] || fail "the log has not one line for each step"
holds out '^step 4/4  loss'
holds run/adapter_config.json '"r": 4,'
holds gradients.safetensors 'base_model\.model\.model\.layers\.0\.self_attn\.q_proj\.lora_A\.weight'

# going on from a checkpoint gives the files that not stopping gives
again='--data data.jsonl --rank 4 --lr 1e-2 --tokens 8 --accumulate 2 --save-every 2 --eval-data data.jsonl --eval-every 3'
# shellcheck disable=SC2086 # options and values
{
  bad 1 'no checkpoint to resume from' train model.onnx $again --out part --steps 7 --resume
  good train model.onnx $again --out whole --steps 7 --log whole.jsonl
  good train model.onnx $again --out part --steps 5 --log part.jsonl
  rm -r part/checkpoint-5
  mkdir part/checkpoint-x part/checkpoint-9
  bad 1 'saved with learning_rate=0.01' train model.onnx $again --out part --steps 7 --resume --lr 1
  bad 1 'saved with other adapters' train model.onnx $again --out part --steps 7 --resume --rank 5
  good train model.onnx $again --out part --steps 7 --log part.jsonl --resume
}
for file in adapter_model.safetensors checkpoint-7/trainer.safetensors checkpoint-7/run.json \
  checkpoint-6/adapter_model.safetensors; do
  checks=$((checks + 1))
  cmp -s whole/$file part/$file || fail "$file of a run that was resumed differs"
done
for log in whole part; do sed 's/"tokens_per_s.*//' $log.jsonl >$log.lines; done
cmp -s whole.lines part.lines || fail "the log of a run that was resumed differs"
good train model.onnx --data data.jsonl --out patient --lr 0 --steps 9 --eval-data data.jsonl --eval-every 1 --patience 2 \
  --save-every 1 --log patient.jsonl
[ "$(grep -c eval_loss patient.jsonl)" -eq 3 ] || fail "two evaluations without gain should end the run"
good train model.onnx --data data.jsonl --out patient --lr 0 --steps 9 --eval-data data.jsonl --eval-every 1 --patience 2 \
  --save-every 1 --log patient.jsonl --resume
[ "$(grep -c eval_loss patient.jsonl)" -eq 3 ] || fail "a run that had ended went on"

# in 8 bits, too
eight='--text run.txt --full --optimizer adamw8bit --lr 1e-3 --tokens 64 --sequence 32 --save-every 2'
yes 'some text to learn from' | head -c 2000 >run.txt
# shellcheck disable=SC2086 # options and values
{
  good train model.onnx $eight --out whole8 --steps 4
  good train model.onnx $eight --out part8 --steps 2
  good train model.onnx $eight --out part8 --steps 4 --resume
  bad 1 'saved with optimizer=1, this run has optimizer=0' train model.onnx $eight --optimizer adamw --out part8 --resume
}
cmp -s whole8/checkpoint-4/trainer.safetensors part8/checkpoint-4/trainer.safetensors || fail "8 bits: resumed run differs"
holds whole8/checkpoint-4/trainer.safetensors 'state1\.model\.embed_tokens'

printf '{"rank": 2, "targets": ["q_proj", "v_proj"], "full": false, "lr": 0.001, "steps": 1, "init": null, "pack": null}' >settings.json
good train model.onnx --data data.jsonl --out configured --config settings.json --rank 3
holds out '^trains 2 adapters: 1 q_proj, 1 v_proj; [0-9]* numbers$'
holds configured/adapter_config.json '"r": 3,'
good train model.onnx --data data.jsonl --out whole_head --modules-to-save lm_head --targets o_proj --steps 1
holds out '^trains 1 adapters: 1 o_proj; 1 modules whole: 1 lm_head; [0-9]* numbers$'
good eval model.onnx --data data.jsonl --adapter whole_head
good train model.onnx --data data.jsonl --out from_matrices --init pissa --rank 2 --steps 1
holds from_matrices/adapter_config.json '"r": 4,'
good eval model.onnx --data data.jsonl --adapter from_matrices
bad 1 'takes no target_parameters' train model.onnx --data data.jsonl --out other --full --target-parameters mlp.experts
"$engraft" train model.onnx --data data.jsonl --out cut --sequence 5 --steps 1 >out 2>err || fail "--sequence: $(cat err)"
holds err '1 of 2 documents are longer than 5 tokens and were cut'
bad 1 '--modules-to-save conflicts' train model.onnx --data data.jsonl --out again --init-adapter run --modules-to-save lm_head
bad 1 '--rank conflicts' train model.onnx --data data.jsonl --out again --init-adapter run --rank 5
bad 1 '--targets conflicts' train model.onnx --data data.jsonl --out again --init-adapter run --targets q_proj
mkdir spoiled
sed 's/"r": 4/"r": 5/' run/adapter_config.json >spoiled/adapter_config.json
cp run/adapter_model.safetensors spoiled/
bad 1 'q_proj.lora_A.weight is [4,16], not [5,16]' train model.onnx --data data.jsonl --out again --init-adapter spoiled
bad 1 'q_proj.lora_A.weight is [4,16], not [5,16]' eval model.onnx --data data.jsonl --adapter spoiled
bad 1 'q_proj.lora_A.weight is [4,16], not [5,16]' export model.onnx --adapter spoiled --format peft -o exported
head -c 300 run/adapter_model.safetensors >spoiled/adapter_model.safetensors
bad 1 'adapter_model.safetensors' generate model.onnx --adapter spoiled --prompt x
absent again
absent exported
good train model.onnx --data data.jsonl --out again --init-adapter run --rank 4 --steps 1
for option in '--checkpoint off' '--checkpoint recompute' '--checkpoint offload' \
  '--checkpoint offload --double-buffer off --host-budget 1G --memory-budget 1G'; do
  # shellcheck disable=SC2086 # options and values
  good train model.onnx --data data.jsonl --out saved --rank 4 --alpha 8 --steps 4 --lr 1e-2 --tokens 16 $option
  cmp -s saved/adapter_model.safetensors run/adapter_model.safetensors || fail "the adapter of $option differs"
done
good export model.onnx --adapter run --format peft -o exported
cmp -s run/adapter_model.safetensors exported/adapter_model.safetensors || fail "the exported adapter differs"
good export model.onnx --adapter run --format peft --portable --dtype f16 -o portable
holds portable/adapter_config.json '"lora_alpha": 4,'
bad 2 '--portable is a form of' export model.onnx --adapter run --format merged --portable -o merged.onnx
absent merged.onnx
good eval model.onnx --data data.jsonl --adapter run --json
adapted=$(cut -c 1-14 out)
good export model.onnx --adapter run --format gguf --dtype f16 -o adapter.gguf
holds adapter.gguf 'blk\.0\.attn_q\.weight\.lora_a'
good export model.onnx --adapter run --format onnx_adapter -o lora
there lora/adapter.onnx_adapter
good eval lora/model.onnx --data data.jsonl
good export model.onnx --adapter run --format merged --base dequantised --dtype nf4 --data data.jsonl -o merged/nf4
holds out '^loss [0-9.]+ in the original base, [0-9.]+ in the dequantised one \(nf4, blocks of 64\)$'
good eval merged/nf4/model.onnx --data data.jsonl
bad 1 'for merged models' export model.onnx --adapter run --format gguf --dtype nf4 -o x.gguf
for dtype in f32 f16 bf16; do
  good export model.onnx --adapter run --format merged --dtype $dtype -o merged/$dtype
  good eval merged/$dtype/model.onnx --data data.jsonl --json
  [ $dtype != f32 ] || [ "$(cut -c 1-14 out)" = "$adapted" ] || fail "merged loss $(cat out), not $adapted"
done

# ---- a base of 4-bit codes ----
good eval model.onnx --data data.jsonl --adapter run --quant nf4 --json
good train model.onnx --data data.jsonl --out coded --steps 2 --quant fp4 --quant-block 32 --double-quant off
bad 1 'blocks of 48 numbers' train model.onnx --data data.jsonl --out coded --quant nf4 --quant-block 48
bad 1 'full training' train model.onnx --data data.jsonl --out coded --quant nf4 --full

# a save that fails leaves what was there
bad 1 'data.jsonl' train model.onnx --data data.jsonl --out data.jsonl --steps 1
holds data.jsonl '"input_ids":\[9,8,7,6\]'

# ---- the other commands ----
good eval model.onnx --data data.jsonl --json
holds out '^\{"loss":[0-9.]+,"perplexity":[0-9.]+,"documents":2,"tokens":12,"targets":9\}$'
before=$(sed 's/.*"loss":\([0-9]*\).*/\1/' out)
good eval model.onnx --data data.jsonl --adapter run
[ "$before" -ge 5 ] || fail "random weights should know nothing: $before"
good inspect model.onnx --json
holds out '"model.layers.0.self_attn.q_proj"'
good inspect model.onnx
holds out 'down_proj'
good generate model.onnx --prompt 'ab' --max-tokens 3 --temperature 1 --seed 5
good generate model.onnx --prompt-ids 1,2 --max-tokens 3 --adapter run
holds out '^[0-9]+,[0-9]+,[0-9]+$'
good rewrite model.onnx -o rewritten.onnx --report report.json
there rewritten.onnx
holds report.json '"pass":"name_modules"'
good rewrite model.onnx -o training.onnx --passes training --rank 2 --targets q_proj
good inspect training.onnx
bad 1 'no linear layer is named "nobody"' rewrite model.onnx -o other.onnx --passes training --targets nobody
good rewrite model.onnx -o rewritten.txt --text --passes eliminate_dead
holds rewritten.txt 'RMSNormalization'
good eval rewritten.onnx --data data.jsonl
good train model.onnx --data data.jsonl --out full --full --steps 2 --lr 1e-3 --log full.jsonl
there full/model.onnx
good eval full/model.onnx --data data.jsonl

# ---- plans ----
good plan model.onnx --tokens 64
holds out 'MiB on the device'
good plan model.onnx --tokens 64 -o plan.json
there plan.json
holds plan.json '"engraft_plan": 1'
good plan model.onnx --data data.jsonl --json
holds out '"shapes": \[\{"rows": 1, "tokens": 12\}\]'
good train model.onnx --data data.jsonl --out planned --tokens 64 --plan plan.json --steps 2
bad 1 'plan.json: the plan is for rank 16, not 8' train model.onnx --data data.jsonl --out refused --tokens 64 --plan plan.json --rank 8
good plan model.onnx --tokens 64 --lora-dropout 0.1 --seed 1 -o dropping.json
bad 1 'the plan is for seed 1, not 2' train model.onnx --data data.jsonl --out refused --tokens 64 --lora-dropout 0.1 --seed 2 \
  --plan dropping.json
absent refused
bad 1 'no-such.json' train model.onnx --data data.jsonl --out refused --plan no-such.json
bad 1 'at least' plan model.onnx --memory-budget 100
bad 2 'exclude each other' plan model.onnx --data data.jsonl --text data.jsonl
bad 2 '--out' plan model.onnx --out run

# ---- an interrupted run keeps what was learned ----
checks=$((checks + 1))
"$engraft" train model.onnx --data data.jsonl --out stopped --steps 100000000 --log stopped.jsonl >out 2>err &
process=$!
i=0
while [ ! -s stopped.jsonl ] && [ $i -lt 200 ]; do sleep 0.1; i=$((i + 1)); done
kill -INT $process
wait $process
[ $? -eq 1 ] || fail "an interrupted run should exit with 1"
holds err 'stopped by a signal after step [0-9]+'
step=$(sed -n 's/.*after step \([0-9]*\);.*/\1/p' err)
there stopped/adapter_model.safetensors
good eval model.onnx --data data.jsonl --adapter stopped
there "stopped/checkpoint-$step/trainer.safetensors"

# ---- going on clears away what a killed run left, and keeps the lines of the log, however long they are ----
good train model.onnx --data data.jsonl --out killed --steps 2 --save-every 2 --log killed.jsonl
mkdir killed/checkpoint-4.partial
touch killed/adapter_model.safetensors.tmp-17 killed/checkpoint-4.partial/trainer.safetensors.tmp-17
: >killed/checkpoint-4.partial/adapter_config.json
printf '{"step":1,"expert_tokens":[%01000d]}\n{"step":2,"expert_tokens":[%01000d]}\n{"step":3}\n{"ste' 0 0 >killed.jsonl
good train model.onnx --data data.jsonl --out killed --steps 4 --save-every 2 --log killed.jsonl --resume
for left in killed/adapter_model.safetensors.tmp-17 killed/checkpoint-4.partial; do absent $left; done
checks=$((checks + 1))
[ "$(sed 's/,.*//' killed.jsonl | tr -d '\n')" = '{"step":1{"step":2{"step":3{"step":4' ] || fail "the log: $(cut -c 1-60 killed.jsonl)"

echo "$checks checks, $failures failed"
[ "$failures" -eq 0 ]
