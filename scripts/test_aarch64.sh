#!/bin/sh
# Cross-compiles the library for aarch64 and runs its kernels on every case of poise.testing under qemu.
#
# For machines that are not aarch64; needs Debian's g++-aarch64-linux-gnu and qemu-user, and a .venv from `make test`.
set -eu
cd "$(dirname "$0")/.."
build=build/aarch64
for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
  command -v "$tool" > /dev/null || { echo "$tool is missing: apt install g++-aarch64-linux-gnu qemu-user"; exit 1; }
done

.venv/bin/cmake -S . -B "$build" -G Ninja --log-level=WARNING -DCMAKE_MAKE_PROGRAM="$PWD/.venv/bin/ninja" \
  -DPOISE_NATIVE=ON -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_EXE_LINKER_FLAGS=-static
.venv/bin/ninja -C "$build" --quiet poise driver

.venv/bin/python tests/native/cases.py dump "$build/cases.bin"
POISE_POISON=1 qemu-aarch64 "$build/driver" "$build/cases.bin" "$build/results.bin"
.venv/bin/python tests/native/cases.py check "$build/results.bin"
