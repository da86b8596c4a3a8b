// How decodes and chunks are divided into pieces that cores take one after another.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "attention.h"

namespace paged {

// Pieces of decodes per thread, where there is enough to do ...
constexpr int64_t kPiecesPerThread = 4;
// ... which of fewer tokens there is not.
constexpr int64_t kFewTokens = 128;

// Pieces of chunks per thread, where there is enough to do.
constexpr int64_t kChunkPiecesPerThread = 6;

// Partial results [first, first + count) belong to one row.
struct Merge {
    int64_t row, first, count;
};

// Contexts divided into their sections, whatever the number of threads: each is summed by itself. So is each head, by which
// sections are divided where there are few.
struct Division {
    std::vector<Piece> pieces;
    std::vector<Merge> merges;
    int64_t num_partials = 0;

    void add(const Piece& context) {
        const int64_t first = context.first / kSection, count = (context.last - 1) / kSection + 1 - first;
        if (count > 1) merges.push_back({context.row, num_partials, count});
        for (int64_t section = first; section < first + count; ++section) {
            Piece piece = context;
            piece.first = std::max(context.first, section * kSection);
            piece.last = std::min(context.last, (section + 1) * kSection);
            piece.partial = count > 1 ? num_partials++ : -1;
            pieces.push_back(piece);
        }
        num_tokens_ += context.last - context.first;
    }

    void split_heads(int num_threads) {
        if (num_threads == 1 || pieces.empty() || num_tokens_ < kFewTokens) return;
        const int64_t num_heads = pieces.front().num_heads, wanted = kPiecesPerThread * num_threads;
        const int64_t parts = std::min(num_heads, (wanted + num_pieces() - 1) / num_pieces());
        if (parts == 1) return;
        std::vector<Piece> divided;
        for (const Piece& whole : pieces)
            for (int64_t part = 0; part < parts; ++part) {
                Piece piece = whole;
                piece.first_head = int(num_heads * part / parts);
                piece.num_heads = int(num_heads * (part + 1) / parts) - piece.first_head;
                divided.push_back(piece);
            }
        pieces = std::move(divided);
    }

   private:
    int64_t num_pieces() const { return pieces.size(); }

    int64_t num_tokens_ = 0;
};

// Pieces of chunks, longest first: cores take one after another.
struct ChunkDivision {
    std::vector<ChunkPiece> pieces;

    void build(const Shape& shape, const std::vector<ChunkPiece>& chunks, int num_threads) {
        // Keys are packed once per piece, so pieces are wide, unless cores would go without.
        for (int64_t rows = kChunkRows; rows >= 2 * kRows; rows /= 2) {
            pieces.clear();
            for (const ChunkPiece& chunk : chunks) add(shape, chunk, std::max<int64_t>(1, rows / shape.group));
            if (num_threads == 1 || int64_t(pieces.size()) >= kChunkPiecesPerThread * num_threads) break;
        }
        std::stable_sort(pieces.begin(), pieces.end(),
                         [](const ChunkPiece& a, const ChunkPiece& b) { return work(a) > work(b); });
    }

   private:
    static int64_t work(const ChunkPiece& piece) {
        const int64_t context = std::max(piece.position + piece.num_tokens, piece.context);
        const int64_t read = context - piece.lowest;
        return piece.num_tokens * (piece.window ? std::min(read, piece.window + piece.num_tokens) : read);
    }

    void add(const Shape& shape, const ChunkPiece& chunk, int64_t longest) {
        const int64_t count = (chunk.num_tokens + longest - 1) / longest;
        for (int head = 0; head < shape.kv_heads; ++head)
            for (int64_t i = 0; i < count; ++i) {
                const int64_t first = chunk.num_tokens * i / count, last = chunk.num_tokens * (i + 1) / count;
                ChunkPiece piece = chunk;
                piece.row += first;
                piece.position += first;
                piece.num_tokens = last - first;
                piece.kv_head = head;
                pieces.push_back(piece);
            }
    }
};

}  // namespace paged
