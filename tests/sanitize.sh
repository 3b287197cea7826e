#!/bin/sh
# Builds the native part with address and undefined-behaviour sanitizers in build/sanitize and runs its unit
# tests there; `make sanitize` calls it. Memory of HugeBuffer comes from mmap and is not checked.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
build=build/sanitize
package=$build/python

mkdir -p $build
cmake -G Ninja -S native -B $build/native -DLOADPROOF_SANITIZE=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DPython_EXECUTABLE="$(command -v "$python")" -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" >$build/configure.log
cmake --build $build/native
rm -rf $package
mkdir -p $package
cp -r src/loadproof $package/
rm -f $package/loadproof/_native*.so
cp $build/native/_native*.so $package/loadproof/

# -S, and with it no .pth file: an editable install would put its own loadproof before this one.
PYTHONPATH="$package:.:$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
LD_PRELOAD="$(c++ -print-file-name=libasan.so) $(c++ -print-file-name=libstdc++.so)"
export PYTHONPATH PYTHONDONTWRITEBYTECODE=1 ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1
export UBSAN_OPTIONS=print_stacktrace=1
exec env LD_PRELOAD="$LD_PRELOAD" "$python" -S -m pytest -q -p no:cacheprovider --capture=no \
  tests/unit/test_native_*.py tests/unit/test_cpu_device.py tests/unit/test_engine_loader.py "$@"
