// Kernels for single rows: embedding, norm, activation, gather, reduction; and the copy of whole KV blocks. Memory
// bandwidth limits all of them, so loads are 16 bytes wide and nothing is read twice.
//
// Rows are moved N elements at a time: 16 bytes if a row is a multiple of that, else one element.
#include "activation.h"
#include "norm.h"
#include "rounded.h"

// ------------------------------------------------------------------------------------------- embedding

// Whether rows are added to the output, which they replace otherwise.
constexpr bool ADD = true;

template <int N, bool ADDS, class T>
DEVICE void scale_row(T* out, const T* input, u32 cols, float scale) {
    for (u32 c = threadIdx.x * N; c < cols; c += blockDim.x * N) {
        Vec<T, N> x = load<N>(input + c), old = {};
        if constexpr (ADDS) old = load<N>(out + c);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float value = to_float(x.x[i]);
            x.x[i] = from_float<T>(ADDS ? fmaf(value, scale, to_float(old.x[i])) : value * scale);
        }
        store(out + c, x);
    }
}

// Grid: one CTA per token.
template <class T, bool ADDS = false>
DEVICE void embed(const EmbedParams& p) {
    const T* row = (const T*)p.table + (u64)token_row(p.ids, p.drawn, blockIdx.x, p.vocabulary) * p.cols;
    T* out = (T*)p.out + (u64)blockIdx.x * p.cols;
    if (p.cols % WIDE<T> == 0) {
        scale_row<WIDE<T>, ADDS>(out, row, p.cols, p.scale);
    } else {
        scale_row<1, ADDS>(out, row, p.cols, p.scale);
    }
}

// ------------------------------------------------------------------------------------------- norm

constexpr bool RMS = false;
constexpr bool LAYER = true;

// The row of a CTA, N elements at a time. Each thread reads back only its own elements of `row`, which is shared memory.
template <int N, bool IS_LAYER, class T>
struct NormRow {
    const NormParams& p;
    T* const out;
    const T* const input;
    T* const residual;
    float* const row;
    float mean = 0.0f, inverse = 0.0f;

    DEVICE NormRow(const NormParams& p, float* row)
        : p(p), out((T*)p.out + start()), input((const T*)p.input + start()),
          residual(p.residual ? (T*)p.residual + start() : nullptr), row(row) {}

    // Returns the index of the row's first element among those of all rows.
    DEVICE u64 start() const { return (u64)blockIdx.x * p.cols; }
    DEVICE u32 first() const { return threadIdx.x * N; }
    DEVICE u32 step() const { return blockDim.x * N; }

    // Stores the row in `row` as f32, after a residual before the norm has been added and stored, and computes its mean and the
    // inverse of its deviation.
    DEVICE void measure(float* scratch) {
        T* const added = p.residual_after ? nullptr : residual;
        float sum = 0.0f;
        for (u32 c = first(); c < p.cols; c += step()) {
            Vec<T, N> x = load<N>(input + c);
            if (added) {
                Vec<T, N> old = load<N>(added + c);
#pragma unroll
                for (int i = 0; i < N; ++i) x.x[i] = from_float<T>(to_float(old.x[i]) + to_float(x.x[i]));
                store(added + c, x);
            }
#pragma unroll
            for (int i = 0; i < N; ++i) row[c + i] = to_float(x.x[i]);
            if constexpr (IS_LAYER) {
#pragma unroll
                for (int i = 0; i < N; ++i) sum += row[c + i];
            } else {
                sum = add_squares(sum, x);
            }
        }
        float squares = block_sum(sum, scratch);
        if constexpr (IS_LAYER) {
            // The variance takes a second pass: E[x²] − E[x]² would cancel if the mean is large.
            mean = squares / p.cols;
            squares = 0.0f;
            for (u32 c = first(); c < p.cols; c += step()) {
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    const float centred = row[c + i] - mean;
                    squares = fmaf(centred, centred, squares);
                }
            }
            squares = block_sum(squares, scratch);
        }
        inverse = inverse_root(squares, p.cols, p.eps);
    }

    // Returns the output from column c on.
    DEVICE Vec<T, N> result(u32 c) const {
        const T* const addend = p.residual_after ? residual : nullptr;
        float weight[N], bias[N] = {};
        load_floats<N>(weight, p.weight + c);
        if (IS_LAYER && p.bias) load_floats<N>(bias, p.bias + c);
        Vec<T, N> y, add = {};
        if (addend) add = load<N>(addend + c);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float value = normed(row[c + i] - mean, inverse, weight[i] + p.weight_offset, bias[i]);
            y.x[i] = from_float<T>(addend ? value + to_float(add.x[i]) : value);
        }
        return y;
    }
};

template <int N, bool IS_LAYER, class T>
DEVICE void norm_row(const NormParams& p, float* row, float* scratch) {
    NormRow<N, IS_LAYER, T> of(p, row);
    of.measure(scratch);
    for (u32 c = of.first(); c < p.cols; c += of.step()) store(of.out + c, of.result(c));
}

// Grid: one CTA per row. Dynamic shared memory: the row as f32.
template <class T, bool IS_LAYER>
DEVICE void norm(const NormParams& p) {
    DYNAMIC_SHARED(row);
    SHARED_ARRAY(float, scratch, 32);
    if (p.cols % WIDE<T> == 0) {
        norm_row<WIDE<T>, IS_LAYER, T>(p, (float*)row, scratch);
    } else {
        norm_row<1, IS_LAYER, T>(p, (float*)row, scratch);
    }
}

// The same, and the rounded output.
template <class T, bool IS_LAYER>
DEVICE void norm_codes(const NormCodesParams& params) {
    DYNAMIC_SHARED(row);
    SHARED_ARRAY(float, scratch, 32);
    constexpr int N = WIDE<T>;
    NormRow<N, IS_LAYER, T> of(params.norm, (float*)row);
    of.measure(scratch);
    for (u32 c = of.first(); c < params.norm.cols; c += of.step()) {
        const Vec<T, N> y = of.result(c);
        store(of.out + c, y);
        float values[N];
        widen(y, values);
        round_block(values, params.rounded, of.start() + c);
    }
}

// ------------------------------------------------------------------------------------------- activation

template <Activation KIND>
DEVICE float gated(const GluParams& p, float gate, float up) {
    if constexpr (KIND == CLAMPED_SWIGLU) {
        // fminf would replace NaN.
        gate = gate > p.limit ? p.limit : gate;
        up = up > p.limit ? p.limit : up < -p.limit ? -p.limit : up;
        return (up + 1.0f) * gate * sigmoid(p.alpha * gate);
    } else {
        return activate<KIND>(gate) * up;
    }
}

// Returns the output from column c on.
template <int N, Activation KIND, class T>
DEVICE Vec<T, N> gated_columns(const GluParams& p, u32 c) {
    const T* const gate = (const T*)p.input + (u64)blockIdx.x * 2 * p.cols;
    Vec<T, N> x = load<N>(gate + c), y = load<N>(gate + p.cols + c);
#pragma unroll
    for (int i = 0; i < N; ++i) x.x[i] = from_float<T>(gated<KIND>(p, to_float(x.x[i]), to_float(y.x[i])));
    return x;
}

template <int N, Activation KIND, class T>
DEVICE void glu_row(const GluParams& p) {
    T* const out = (T*)p.out + (u64)blockIdx.x * p.cols;
    for (u32 c = (blockIdx.y * blockDim.x + threadIdx.x) * N; c < p.cols; c += gridDim.y * blockDim.x * N)
        store(out + c, gated_columns<N, KIND, T>(p, c));
}

// Grid: (rows, parts of a row).
template <class T, Activation KIND>
DEVICE void glu(const GluParams& p) {
    if (p.cols % WIDE<T> == 0) {
        glu_row<WIDE<T>, KIND, T>(p);
    } else {
        glu_row<1, KIND, T>(p);
    }
}

// The same, and the rounded output.
template <class T, Activation KIND>
DEVICE void glu_codes(const GluCodesParams& params) {
    constexpr int N = WIDE<T>;
    const GluParams& p = params.glu;
    const u64 start = (u64)blockIdx.x * p.cols;
    for (u32 c = (blockIdx.y * blockDim.x + threadIdx.x) * N; c < p.cols; c += gridDim.y * blockDim.x * N) {
        const Vec<T, N> x = gated_columns<N, KIND, T>(p, c);
        store((T*)p.out + start + c, x);
        float values[N];
        widen(x, values);
        round_block(values, params.rounded, start + c);
    }
}

template <int N, Activation KIND, class T>
DEVICE void act_row(T* out, const T* input, u32 cols) {
    for (u32 c = (blockIdx.y * blockDim.x + threadIdx.x) * N; c < cols; c += gridDim.y * blockDim.x * N) {
        Vec<T, N> x = load<N>(input + c);
#pragma unroll
        for (int i = 0; i < N; ++i) x.x[i] = from_float<T>(activate<KIND>(to_float(x.x[i])));
        store(out + c, x);
    }
}

// Grid: (rows, parts of a row).
template <class T, Activation KIND>
DEVICE void act(const ActParams& p) {
    const u64 start = (u64)blockIdx.x * p.cols;
    if (p.cols % WIDE<T> == 0) {
        act_row<WIDE<T>, KIND>((T*)p.out + start, (const T*)p.input + start, p.cols);
    } else {
        act_row<1, KIND>((T*)p.out + start, (const T*)p.input + start, p.cols);
    }
}

// ------------------------------------------------------------------------------------------- copies

template <int N, class T>
DEVICE void copy_row(T* out, const T* input, u32 cols) {
    for (u32 c = threadIdx.x * N; c < cols; c += blockDim.x * N) store(out + c, load<N>(input + c));
}

// Grid: one CTA per row of `out`.
template <class T>
DEVICE void gather_rows(const GatherRowsParams& p) {
    T* out = (T*)p.out + (u64)blockIdx.x * p.cols;
    const T* input = (const T*)p.input + (u64)p.row_index[blockIdx.x] * p.cols;
    if (p.cols % WIDE<T> == 0) {
        copy_row<WIDE<T>>(out, input, p.cols);
    } else {
        copy_row<1>(out, input, p.cols);
    }
}

// Grid: (rows, parts of a row).
template <class T>
DEVICE void gather_columns(const GatherColumnsParams& p) {
    const u64 start = (u64)blockIdx.x * p.cols;
    const T* input = (const T*)p.input + start;
    T* out = (T*)p.out + start;
    for (u32 c = blockIdx.y * blockDim.x + threadIdx.x; c < p.cols; c += gridDim.y * blockDim.x)
        out[c] = input[(u32)p.column_index[c]];
}

// ------------------------------------------------------------------------------------------- reduction

enum Pool { FIRST, MEAN };

template <int N, Pool KIND, class T>
DEVICE void pool_row(T* out, const T* input, u32 cols, u32 rows) {
    for (u32 c = (blockIdx.y * blockDim.x + threadIdx.x) * N; c < cols; c += gridDim.y * blockDim.x * N) {
        Vec<T, N> x = load<N>(input + c);
        if constexpr (KIND == MEAN) {
            float sum[N];
#pragma unroll
            for (int i = 0; i < N; ++i) sum[i] = to_float(x.x[i]);
            // The loads of several rows are under way at once; their sum is in the order of rows.
#pragma unroll 4
            for (u32 row = 1; row < rows; ++row) {
                const Vec<T, N> next = load<N>(input + (u64)row * cols + c);
#pragma unroll
                for (int i = 0; i < N; ++i) sum[i] += to_float(next.x[i]);
            }
#pragma unroll
            for (int i = 0; i < N; ++i) x.x[i] = from_float<T>(sum[i] / (float)rows);
        }
        store(out + c, x);
    }
}

// Grid: (rows of `out`, parts of a row).
template <class T, Pool KIND>
DEVICE void pool_rows(const PoolRowsParams& p) {
    const u32 rows = p.lens[blockIdx.x];
    T* out = (T*)p.out + (u64)blockIdx.x * p.cols;
    const T* input = (const T*)p.input + (u64)(p.row_index[blockIdx.x] + 1 - rows) * p.cols;
    if (p.cols % WIDE<T> == 0) {
        pool_row<WIDE<T>, KIND>(out, input, p.cols, rows);
    } else {
        pool_row<1, KIND>(out, input, p.cols, rows);
    }
}

// ------------------------------------------------------------------------------------------- KV blocks

// A block is contiguous over all its layers. Grid: (pairs, parts of a block).
DEVICE void copy_pairs(const CopyBlocksParams& p) {
    const u32* pair = p.pairs + 2 * blockIdx.x;
    const u64 count = p.block_bytes / sizeof(uint4);
    const uint4* from = (const uint4*)p.cache + pair[0] * count;
    uint4* to = (uint4*)p.cache + pair[1] * count;
    for (u64 i = blockIdx.y * blockDim.x + threadIdx.x; i < count; i += gridDim.y * blockDim.x) to[i] = from[i];
}

// Changes the block tables that stay from step to step. Grid: one CTA per run of adjacent entries.
DEVICE void write_runs(const TableRunsParams& p) {
    const u32* run = p.runs + 3 * blockIdx.x;
    for (u32 i = threadIdx.x; i < run[2]; i += blockDim.x) p.tables[run[0] + i] = p.values[run[1] + i];
}
