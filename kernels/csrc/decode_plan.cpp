// The plan of a step of decodes, which the host makes for every one of a GPU (work_partition.py and
// block_entries.py in kernels/gpu/attention, kernels/cpu/next_tokens.py). Plain forms stand there and give the same. The
// interpreter stays locked: a call takes some microseconds.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "buffers.h"

namespace nb = nanobind;

namespace decode_plan {
namespace {

using buffers::Array;
using buffers::Bools;
using buffers::Ints;

using Int32s = Array<int32_t>;

// partition: `parts` [3, programs + rows], zeros, are the rows of parts, their first tiles and those behind the last;
// `window` 0: there is none.
void partition_work(nb::handle context_lens, int64_t tile, int64_t window, bool is_chunked, nb::handle parts,
                    nb::handle program_parts, nb::handle row_parts) {
    const Ints lengths(context_lens, 1);
    const Int32s of_parts(parts, 2, true), of_programs(program_parts, 1, true), of_rows(row_parts, 1, true);
    const int64_t num_rows = lengths.size(), num_programs = of_programs.size() - 1;
    if (tile < 1 || window < 0 || num_programs < 1 || of_rows.size() != num_rows + 1 || of_parts.num_stacks() != 3 ||
        of_parts.size() != num_programs + num_rows)
        throw std::invalid_argument("arrays of another partition");
    const auto first_tile = [&](int64_t row) {
        if (!window) return int64_t(0);
        const int64_t length = lengths.data()[row];
        return (is_chunked ? (length - 1) / window * window : std::max(length - window, int64_t(0))) / tile;
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

// context_tables, first part: `places` [2, contexts] are the lengths, and where each context's entries begin; `flags`
// whether its slots are taken from the end. Contexts behind those of `rows` are padding. Returns how many entries there
// are in all.
int64_t place_contexts(nb::handle lengths, nb::handle rows, nb::handle is_reversed, int64_t block_size,
                       nb::handle places, nb::handle flags) {
    const Ints of_contexts(lengths, 1), chosen(rows, 1);
    const Bools reversed(is_reversed, 1);
    const Int32s out(places, 2, true);
    const Array<int8_t> turned(flags, 1, true);
    const int64_t count = of_contexts.size();
    if (block_size < 1 || out.num_stacks() != 2 || out.size() != count || turned.size() != count ||
        chosen.size() > count)
        throw std::invalid_argument("arrays of other contexts");
    int64_t num_entries = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t length = of_contexts.data()[i], row = i < chosen.size() ? chosen.data()[i] : -1;
        if (length < 0 || row >= reversed.size() || (row < 0 && i < chosen.size()))
            throw std::invalid_argument("contexts outside the tables");
        out.row(0)[i] = int32_t(length);
        out.row(1)[i] = int32_t(num_entries);
        turned.data()[i] = row >= 0 && reversed.data()[row];
        num_entries += (length + block_size - 1) / block_size;
    }
    return num_entries;
}

// context_tables, second part: the blocks of each context into `entries`, from its place on; of padding the scratch block.
void copy_entries(nb::handle block_tables, nb::handle rows, nb::handle places, int64_t scratch_block,
                  nb::handle entries) {
    const Ints tables(block_tables, 2), chosen(rows, 1);
    const Int32s of_contexts(places, 2), out(entries, 1, true);
    const int64_t count = of_contexts.size();
    for (int64_t i = 0; i < count; ++i) {
        const int64_t first = of_contexts.row(1)[i], behind = i + 1 < count ? of_contexts.row(1)[i + 1] : out.size();
        const int64_t width = behind - first;
        if (first < 0 || width < 0 || behind > out.size()) throw std::invalid_argument("entries of other contexts");
        if (i >= chosen.size()) {
            std::fill_n(out.data() + first, width, int32_t(scratch_block));
            continue;
        }
        const int64_t row = chosen.data()[i];
        if (row < 0 || row >= tables.num_stacks() || width > tables.size())
            throw std::invalid_argument("entries outside the tables");
        std::copy_n(tables.row(row), width, out.data() + first);
    }
}

// next_tokens: `tokens` [3, rows and padding] are the ids, positions and slots of the tokens that rows compute next;
// those of padding 0, 0 and the scratch slot. Returns how many of them are the last that is known of their rows.
int64_t next_tokens(nb::handle known, nb::handle block_tables, nb::handle num_computed, nb::handle num_known,
                    nb::handle is_reversed, nb::handle rows, int64_t block_size, int64_t slot_stride,
                    int64_t scratch_slot, nb::handle tokens) {
    const Int32s ids(known, 2);
    const Ints tables(block_tables, 2), computed(num_computed, 1), counts(num_known, 1), chosen(rows, 1);
    const Bools reversed(is_reversed, 1);
    const Ints out(tokens, 2, true);
    const int64_t num_rows = std::min({ids.num_stacks(), tables.num_stacks(), computed.size(), counts.size(), reversed.size()});
    if (block_size < 1 || out.num_stacks() != 3 || chosen.size() > out.size())
        throw std::invalid_argument("arrays of another step");
    int64_t num_last = 0;
    for (int64_t i = 0; i < chosen.size(); ++i) {
        const int64_t row = chosen.data()[i];
        if (row < 0 || row >= num_rows) throw std::invalid_argument("a row outside the table");
        const int64_t position = computed.data()[row], column = position / block_size, slot = position % block_size;
        if (position < 0 || position >= ids.size() || column >= tables.size())
            throw std::invalid_argument("a token outside the table");
        out.row(0)[i] = ids.row(row)[position];
        out.row(1)[i] = position;
        out.row(2)[i] = tables.row(row)[column] * slot_stride + (reversed.data()[row] ? block_size - 1 - slot : slot);
        num_last += position + 1 == counts.data()[row];
    }
    for (int64_t i = chosen.size(); i < out.size(); ++i) {
        out.row(0)[i] = out.row(1)[i] = 0;
        out.row(2)[i] = scratch_slot;
    }
    return num_last;
}

// A contiguous buffer of any type, as bytes.
class Bytes {
  public:
    Bytes(nb::handle object, bool is_written) {
        if (PyObject_GetBuffer(object.ptr(), &view_, is_written ? PyBUF_WRITABLE : PyBUF_SIMPLE))
            throw nb::python_error();
    }
    Bytes(const Bytes&) = delete;
    Bytes& operator=(const Bytes&) = delete;
    ~Bytes() { PyBuffer_Release(&view_); }

    char* data() const { return static_cast<char*>(view_.buf); }
    int64_t size() const { return view_.len; }

  private:
    Py_buffer view_;
};

// Packing.fill: copies arrays to their places in `packed`, first bytes and widths; returns the bytes that are used.
int64_t pack_arrays(nb::handle packed, nb::handle places, nb::handle arrays) {
    const Bytes out(packed, true);
    const Ints of_arrays(places, 2);
    if (of_arrays.num_stacks() != PySequence_Size(arrays.ptr()) || of_arrays.size() != 2)
        throw std::invalid_argument("as many places as arrays");
    int64_t used = 0;
    for (int64_t i = 0; i < of_arrays.num_stacks(); ++i) {
        const nb::object array = nb::steal(PySequence_GetItem(arrays.ptr(), i));
        const Bytes own(array, false);
        const int64_t first = of_arrays.row(i)[0], width = of_arrays.row(i)[1];
        if (own.size() > width || first < 0 || first > out.size() - own.size())
            throw std::invalid_argument("an array larger than its place");
        std::copy_n(own.data(), own.size(), out.data() + first);
        used = first + own.size();
    }
    return used;
}

}  // namespace

void bind(nb::module_& module) {
    module.def("partition_work", partition_work);
    module.def("place_contexts", place_contexts);
    module.def("copy_entries", copy_entries);
    module.def("next_tokens", next_tokens);
    module.def("pack_arrays", pack_arrays);
}

}  // namespace decode_plan
