// Tiles of pairs of the products with the weights of experts.
#pragma once
#include "gpu.h"

// The pairs of one expert that a CTA multiplies: at most ROWS from a tile of the list, which may have several times as
// many. Part blockIdx.z of tile blockIdx.x is this CTA's. If the experts are heads, each has a pair of every token.
struct ExpertTile {
    u32 expert, first, count;

    // `count` is 0 if the CTA has nothing to do.
    DEVICE ExpertTile(const ExpertLinearParams& p, u32 rows) {
        u32 pairs = 0;
        if (p.heads) {
            const u32 tiles = (p.tokens + p.tile_rows - 1) / p.tile_rows;
            expert = blockIdx.x / tiles;
            first = blockIdx.x % tiles * p.tile_rows;
            pairs = expert < p.heads ? min(p.tile_rows, p.tokens - first) : 0;
        } else if (blockIdx.x < p.tiles[0]) {
            const u32* tile = p.tiles + 1 + 3 * blockIdx.x;
            expert = tile[0];
            first = tile[1];
            pairs = tile[2];
        } else {
            expert = first = 0;
        }
        const u32 before = blockIdx.z * rows;
        first += before;
        count = pairs > before ? min(pairs - before, rows) : 0;
    }

    // Returns the pair of a row. Rows beyond the last repeat it and are not written.
    DEVICE u32 pair(const ExpertLinearParams& p, u32 row) const {
        const u32 at = first + min(row, count - 1);
        return p.heads ? at * p.heads + expert : p.order[at];
    }

    // Returns the parameters of the epilogue: rows are pairs.
    template <class T>
    DEVICE LinearParams output(const ExpertLinearParams& p) const {
        LinearParams output = {};
        output.out = (T*)p.out + p.column;
        output.bias = p.bias ? p.bias + ((u64)expert * p.out_stride + p.column) : nullptr;
        output.m = NO_PAIR;
        output.n = p.n;
        output.out_stride = p.out_stride;
        output.scale = 1.0f;
        return output;
    }

    // The row of the epilogue that is not written.
    static constexpr u32 NO_PAIR = 0xffffffffu;
};
