#!/bin/sh
# Builds llama.cpp for benchmarks.compare.llama_cpp, from the source that the sdist of llama-cpp-python carries, for the
# processor that it runs on. Needs Python and a C++ compiler; takes ten minutes on two cores.
#   sh benchmarks/compare/build_llama_cpp.sh [FOLDER]       (.llama.cpp; the programs are in FOLDER/build/bin)
set -e
VERSION=0.3.36
FOLDER=${1:-.llama.cpp}
mkdir -p "$FOLDER"
cd "$FOLDER"
[ -d venv ] || python3 -m venv venv
./venv/bin/pip install --quiet cmake==4.4.4 ninja==1.13.2 scikit-build-core==1.1.2 pyproject-metadata==0.12.1
if [ ! -d "llama_cpp_python-$VERSION" ]; then
    ./venv/bin/pip download --quiet --no-deps --no-binary :all: --no-build-isolation "llama-cpp-python==$VERSION"
    tar xf "llama_cpp_python-$VERSION.tar.gz"
fi
PATH=$PWD/venv/bin:$PATH
cmake -S "llama_cpp_python-$VERSION/vendor/llama.cpp" -B build -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_TESTS=OFF \
    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF
cmake --build build --target llama-batched-bench
