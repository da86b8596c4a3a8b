// The library part of nanobind, compiled into the module: the build needs neither CMake nor a second file.
#include <nb_combined.cpp>
