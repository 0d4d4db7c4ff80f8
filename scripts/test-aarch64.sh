#!/usr/bin/env bash
# Cross-compiles the crate's tests to aarch64 with zig as linker and runs them under qemu: NEON and the portable level
# against the same expectations as on x86. Called by `make test-aarch64`, which puts cargo-zigbuild on the path.
#
# Where a part cannot be installed it says which and ends with success: not every machine can cross-compile, and what
# can be tested natively has been. A test that fails is a failure.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=aarch64-unknown-linux-gnu
sysroot=/usr/aarch64-linux-gnu

not_run() {
    echo "test-aarch64: not run: $1"
    exit 0
}
last_line() {
    tail -n 1 <<<"$1"
}

# A toolchain without rustup may still have the target.
if [ ! -d "$(rustc --print sysroot)/lib/rustlib/$target/lib" ]; then
    command -v rustup >/dev/null || not_run "the Rust toolchain has no target $target and there is no rustup to add it"
    answer=$(rustup target add "$target" 2>&1) || not_run "rustup cannot add $target: $(last_line "$answer")"
fi

missing=()
command -v qemu-aarch64-static >/dev/null || missing+=(qemu-user-static)
[ -e "$sysroot/lib/ld-linux-aarch64.so.1" ] || missing+=(libc6-arm64-cross)
if [ ${#missing[@]} -gt 0 ]; then
    command -v apt-get >/dev/null || not_run "${missing[*]} missing and there is no apt-get to install them"
    [ "$(id -u)" = 0 ] || not_run "${missing[*]} missing: run apt-get install ${missing[*]} as root"
    echo "test-aarch64: installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    answer=$(apt-get update 2>&1 && apt-get install -y --no-install-recommends "${missing[@]}" 2>&1) ||
        not_run "apt-get cannot install ${missing[*]}: $(last_line "$answer")"
fi

# Emulation is slow, and what depends on the architecture shows in few cases.
export PROPTEST_CASES=${PROPTEST_CASES:-64}
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64-static -L $sysroot"
for level in neon portable; do
    echo "test-aarch64: OUTBOARD_ISA=$level, PROPTEST_CASES=$PROPTEST_CASES"
    OUTBOARD_ISA=$level cargo-zigbuild test --no-default-features --lib --tests --target "$target"
done
