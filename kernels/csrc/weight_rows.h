// A weight as it comes, before it is packed: runs of rows that lie in memory or in files, of one number format or another.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "products.h"

namespace products {

// Of rows that lie one after another.
struct RowRun {
    int fd;      // the file they are in; -1: they are in memory
    int64_t at;  // offset in the file, or address
    int64_t num_rows;
    Numbers numbers;
};

inline Numbers numbers_named(const std::string& name) {
    if (name == "float32") return Numbers::float32;
    if (name == "bfloat16") return Numbers::bfloat16;
    if (name == "float16") return Numbers::float16;
    if (name == "int8") return Numbers::int8;
    throw std::invalid_argument("no weights of " + name);
}

inline int64_t bytes_of(Numbers numbers) { return numbers == Numbers::float32 ? 4 : numbers == Numbers::int8 ? 1 : 2; }

// Reads rows into buffers that stay in a core's caches, so that a file goes from the system's page cache to where it is
// packed, and no copy of it ever takes memory. One thread's: rows stay valid until the next are read.
class RowReader {
   public:
    RowReader(const std::vector<RowRun>& runs, const Level& level, int64_t in_width, Numbers wanted)
        : runs_(runs), level_(level), in_width_(in_width), wanted_(wanted) {
        for (const RowRun& run : runs)
            if ((run.numbers == Numbers::int8) != (wanted == Numbers::int8))
                throw std::invalid_argument("int8 rows, and they alone, have scales");
    }

    // Of the same rows, for another thread.
    RowReader another() const { return RowReader(runs_, level_, in_width_, wanted_); }

    // Forgets the rows that were read.
    void clear() { used_ = 0; }

    // Makes room for so many rows. To be called once, before any is read.
    void reserve(int64_t num_rows) {
        rows_.reset(new char[num_rows * in_width_ * bytes_of(wanted_)]);
        const bool converts = std::any_of(runs_.begin(), runs_.end(), [&](const RowRun& run) { return run.numbers != wanted_; });
        if (converts) raw_.reset(new char[num_rows * in_width_ * 4]);
    }

    // Puts pointers to rows [first, first + count), in the wanted numbers, at `rows`. Returns 0 or the system's error;
    // EIO for a file that has become shorter.
    int read(int64_t first, int64_t count, const char** rows) {
        for (const RowRun& run : runs_) {
            const int64_t here = std::min(run.num_rows - first, count);
            if (here > 0) {
                if (const int error = read_run(run, first, here, rows)) return error;
                rows += here;
                count -= here;
                first = run.num_rows;
            }
            first -= run.num_rows;
        }
        return 0;
    }

   private:
    int read_run(const RowRun& run, int64_t first, int64_t count, const char** rows) {
        const int64_t row_bytes = in_width_ * bytes_of(run.numbers), wanted_bytes = in_width_ * bytes_of(wanted_);
        const bool is_converted = run.numbers != wanted_;
        const char* from = reinterpret_cast<const char*>(run.fd < 0 ? run.at + first * row_bytes : 0);
        char* buffer = rows_.get() + used_ * wanted_bytes;
        if (run.fd >= 0) {
            char* to = is_converted ? raw_.get() : buffer;
            if (const int error = read_file(run.fd, run.at + first * row_bytes, count * row_bytes, to)) return error;
            from = to;
        }
        if (is_converted) {
            level_.convert(from, run.numbers, count * in_width_, wanted_, buffer);
            from = buffer;
        }
        if (from == buffer) used_ += count;
        for (int64_t i = 0; i < count; ++i) rows[i] = from + i * wanted_bytes;
        return 0;
    }

    static int read_file(int fd, int64_t offset, int64_t count, char* to) {
        while (count > 0) {
            const ssize_t got = pread(fd, to, count, offset);
            if (got < 0 && errno == EINTR) continue;
            if (got <= 0) return got < 0 ? errno : EIO;
            to += got;
            offset += got;
            count -= got;
        }
        return 0;
    }

    const std::vector<RowRun>& runs_;
    const Level& level_;
    const int64_t in_width_;
    const Numbers wanted_;
    std::unique_ptr<char[]> raw_, rows_;
    int64_t used_ = 0;  // of `rows_`
};

}  // namespace products
