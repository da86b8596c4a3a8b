// The plan of a GPU's decodes, which the host makes for every step (kernels/gpu/work_partition.py, block_entries.py).
// Plain forms stand there and give the same. The interpreter stays locked: a call takes some microseconds.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "buffers.h"

namespace nb = nanobind;

namespace decode_plan {
namespace {

using buffers::Array;
using buffers::Ints;

using Int32s = Array<int32_t>;

// partition: `parts` [3, programs + rows], zeros, are the rows of parts, their first tiles and those behind the last;
// `window` 0: there is none.
void partition_work(nb::handle context_lens, int64_t tile, int64_t window, nb::handle parts, nb::handle program_parts,
                    nb::handle row_parts) {
    const Ints lengths(context_lens, 1);
    const Int32s of_parts(parts, 2, true), of_programs(program_parts, 1, true), of_rows(row_parts, 1, true);
    const int64_t num_rows = lengths.size(), num_programs = of_programs.size() - 1;
    if (tile < 1 || window < 0 || num_programs < 1 || of_rows.size() != num_rows + 1 || of_parts.num_stacks() != 3 ||
        of_parts.size() != num_programs + num_rows)
        throw std::invalid_argument("arrays of another partition");
    const auto first_tile = [&](int64_t row) {
        return window ? std::max(lengths.data()[row] - window, int64_t(0)) / tile : 0;
    };
    const auto behind_tile = [&](int64_t row) { return (lengths.data()[row] + tile - 1) / tile; };
    int64_t num_tiles = 0;
    for (int64_t row = 0; row < num_rows; ++row) {
        if (lengths.data()[row] < 1) throw std::invalid_argument("an empty context");
        num_tiles += behind_tile(row) - first_tile(row);
    }
    const auto start = [&](int64_t program) { return num_tiles * program / num_programs; };  // of its run of tiles
    int64_t part = 0, program = 0, num_before = 0;                                           // tiles before the part
    for (int64_t row = 0; row < num_rows; ++row) {
        of_rows.data()[row] = int32_t(part);
        for (int64_t first = first_tile(row), behind; first < behind_tile(row); first = behind, ++part) {
            while (start(program) <= num_before) of_programs.data()[program++] = int32_t(part);
            behind = std::min(behind_tile(row), first + start(program) - num_before);
            of_parts.row(0)[part] = int32_t(row);
            of_parts.row(1)[part] = int32_t(first);
            of_parts.row(2)[part] = int32_t(behind);
            num_before += behind - first;
        }
    }
    of_rows.data()[num_rows] = int32_t(part);
    while (program <= num_programs) of_programs.data()[program++] = int32_t(part);
}

// block_entries: the first `widths` blocks of each row's table into `entries`, from its start on.
void copy_entries(nb::handle block_tables, nb::handle rows, nb::handle widths, nb::handle entries) {
    const Ints tables(block_tables, 2), chosen(rows, 1), counts(widths, 1);
    const Int32s out(entries, 1, true);
    if (counts.size() != chosen.size()) throw std::invalid_argument("as many widths as rows");
    int64_t num_copied = 0;
    for (int64_t i = 0; i < chosen.size(); ++i) {
        const int64_t row = chosen.data()[i], width = counts.data()[i];
        if (row < 0 || row >= tables.num_stacks() || width < 0 || width > tables.size() ||
            width > out.size() - num_copied)
            throw std::invalid_argument("entries outside the tables");
        std::copy_n(tables.row(row), width, out.data() + num_copied);
        num_copied += width;
    }
}

}  // namespace

void bind(nb::module_& module) {
    module.def("partition_work", partition_work);
    module.def("copy_entries", copy_entries);
}

}  // namespace decode_plan
