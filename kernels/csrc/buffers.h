// Arrays of numpy by the buffer protocol, which takes a tenth of a microsecond: for calls that take hardly longer.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <stdexcept>
#include <type_traits>

namespace buffers {

namespace nb = nanobind;

// A contiguous array, [rows] or [stacks, rows].
template <typename T>
class Array {
  public:
    Array(nb::handle object, int num_dimensions, bool is_written = false) {
        const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (is_written ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(object.ptr(), &view_, flags)) throw nb::python_error();
        if (view_.ndim != num_dimensions || view_.itemsize != sizeof(T) || !is_of_kind(view_.format)) {
            PyBuffer_Release(&view_);
            throw std::invalid_argument("an array of another type or shape");
        }
    }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    ~Array() { PyBuffer_Release(&view_); }

    T* data() const { return static_cast<T*>(view_.buf); }
    T* row(int64_t number) const { return data() + number * size(); }
    int64_t size() const { return view_.shape[view_.ndim - 1]; }  // of the last dimension
    int64_t num_stacks() const { return view_.shape[0]; }

  private:
    static bool is_of_kind(const char* format) {
        if (std::is_same<T, double>::value) return format[0] == 'd';
        if (std::is_same<T, bool>::value) return format[0] == '?';
        if (std::is_same<T, int32_t>::value) return format[0] == 'i';
        if (std::is_same<T, int8_t>::value) return format[0] == 'b';
        return format[0] == 'l' || format[0] == 'q';
    }
    Py_buffer view_;
};

using Ints = Array<int64_t>;
using Floats = Array<double>;
using Bools = Array<bool>;

}  // namespace buffers
