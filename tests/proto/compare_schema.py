#!/usr/bin/env python3
"""Compares proto/onnx.proto with the official ONNX schema of the `onnx` package: every message, field number, name, type and
label, oneofs and enum values. Prints "skipped" and exits 77 when the package or protoc is missing.

usage: compare_schema.py ONNX_PROTO
"""
import os, shutil, subprocess, sys, tempfile

SKIPPED = 77


def skip(reason):
    print(f"skipped: {reason}")
    sys.exit(SKIPPED)


def own_file(path):
    from google.protobuf import descriptor_pb2

    protoc = shutil.which("protoc")
    if not protoc:
        skip("no protoc")
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "set")
        subprocess.run([protoc, f"--proto_path={os.path.dirname(path)}", f"--descriptor_set_out={out}", path], check=True)
        with open(out, "rb") as file:
            return descriptor_pb2.FileDescriptorSet.FromString(file.read()).file


def official_files():
    from google.protobuf import descriptor_pb2

    try:
        from onnx import onnx_ml_pb2
    except ImportError:
        skip("no Python package onnx")
    modules = [onnx_ml_pb2]
    try:
        from onnx import onnx_data_pb2

        modules.append(onnx_data_pb2)
    except ImportError:
        pass
    files = []
    for module in modules:
        file = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        files.append(file)
    return files


def facts(files):
    """One line a fact, so that a difference of sets is the report."""
    found = set()

    def walk(prefix, messages):
        for message in messages:
            path = f"{prefix}{message.name}"
            oneofs = [oneof.name for oneof in message.oneof_decl]
            for field in message.field:
                oneof = oneofs[field.oneof_index] if field.HasField("oneof_index") else "-"
                packed = "packed" if field.options.packed else "-"
                found.add(f"{path}.{field.name} = {field.number}, type {field.type} {field.type_name}, "
                          f"label {field.label}, oneof {oneof}, {packed}")
            for enum in message.enum_type:
                for value in enum.value:
                    found.add(f"{path}.{enum.name}.{value.name} = {value.number}")
            walk(path + ".", message.nested_type)

    for file in files:
        walk(f"{file.package}.", file.message_type)
    return found


def main():
    try:
        import google.protobuf  # noqa: F401
    except ImportError:
        skip("no Python package protobuf")
    official, own = facts(official_files()), facts(own_file(os.path.abspath(sys.argv[1])))
    # What only this file has is newer than the installed package: protoc has refused numbers and names used twice.
    missing, newer = official - own, own - official
    for fact in sorted(missing):
        print("missing:", fact)
    print(f"{len(official)} facts compared, {len(missing)} missing, {len(newer)} newer than the package")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
