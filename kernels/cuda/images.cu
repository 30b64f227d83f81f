// Kernels for images: patches as numbers, learned positions, means of rows, and the rows that move between a program's buffers and the
// media cache.
//
// Rows are moved N elements at a time, as in rows.cu.
#include "gpu.h"

// ------------------------------------------------------------------------------------------- patches

// Grid: one CTA per patch.
template <class T>
DEVICE void patches(const PatchesParams& p) {
    const u64 start = (u64)blockIdx.x * p.cols;
    for (u32 c = threadIdx.x; c < p.cols; c += blockDim.x) {
        const float* channel = p.channels + 2 * (c / p.channel_cols);
        ((T*)p.out)[start + c] = from_float<T>(((float)p.bytes[start + c] - channel[0]) / channel[1]);
    }
}

// ------------------------------------------------------------------------------------------- learned positions

constexpr u32 TAPS = 4;

template <int N, class T>
DEVICE void add_taps(const EmbedTapsParams& p, T* out) {
    const u32* rows = p.tap_rows + (u64)blockIdx.x * TAPS;
    const float* weights = p.tap_weights + (u64)blockIdx.x * TAPS;
    for (u32 c = threadIdx.x * N; c < p.cols; c += blockDim.x * N) {
        Vec<T, N> x = load<N>(out + c);
        float sum[N];
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] = to_float(x.x[i]);
        for (u32 tap = 0; tap < TAPS; ++tap) {
            const Vec<T, N> learned = load<N>((const T*)p.table + (u64)rows[tap] * p.cols + c);
#pragma unroll
            for (int i = 0; i < N; ++i) sum[i] = fmaf(weights[tap], to_float(learned.x[i]), sum[i]);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) x.x[i] = from_float<T>(sum[i]);
        store(out + c, x);
    }
}

// Grid: one CTA per patch.
template <class T>
DEVICE void embed_taps(const EmbedTapsParams& p) {
    T* out = (T*)p.out + (u64)blockIdx.x * p.cols;
    if (p.cols % WIDE<T> == 0) {
        add_taps<WIDE<T>>(p, out);
    } else {
        add_taps<1>(p, out);
    }
}

// ------------------------------------------------------------------------------------------- merged rows

template <int N, class T>
DEVICE void mean_row(const MeanRowsParams& p, T* out, const T* input) {
    for (u32 c = threadIdx.x * N; c < p.cols; c += blockDim.x * N) {
        float sum[N] = {};
        for (u32 row = 0; row < p.merge; ++row) {
            const Vec<T, N> x = load<N>(input + (u64)row * p.cols + c);
#pragma unroll
            for (int i = 0; i < N; ++i) sum[i] += to_float(x.x[i]);
        }
        Vec<T, N> mean;
#pragma unroll
        for (int i = 0; i < N; ++i) mean.x[i] = from_float<T>(sum[i] / (float)p.merge);
        store(out + c, mean);
    }
}

// Grid: one CTA per row of the output.
template <class T>
DEVICE void mean_rows(const MeanRowsParams& p) {
    T* out = (T*)p.out + (u64)blockIdx.x * p.cols;
    const T* input = (const T*)p.input + (u64)blockIdx.x * p.merge * p.cols;
    if (p.cols % WIDE<T> == 0) {
        mean_row<WIDE<T>>(p, out, input);
    } else {
        mean_row<1>(p, out, input);
    }
}

// ------------------------------------------------------------------------------------------- media cache

enum MediaMove { STORE, REPLACE, ADD };

template <int N, MediaMove MOVE, class T>
DEVICE void move_row(T* row, T* kept, u32 cols) {
    for (u32 c = threadIdx.x * N; c < cols; c += blockDim.x * N) {
        if constexpr (MOVE == STORE) {
            store(kept + c, load<N>(row + c));
        } else {
            Vec<T, N> x = load<N>(kept + c);
            if constexpr (MOVE == ADD) {
                const Vec<T, N> old = load<N>(row + c);
#pragma unroll
                for (int i = 0; i < N; ++i) x.x[i] = from_float<T>(to_float(old.x[i]) + to_float(x.x[i]));
            }
            store(row + c, x);
        }
    }
}

// Grid: one CTA per row that is moved.
template <class T, MediaMove MOVE>
DEVICE void media_rows(const MediaRowsParams& p) {
    const u32 index = blockIdx.x, place = p.row_index ? p.row_index[index] : index;
    T* row = (T*)p.rows + (u64)place * p.cols;
    T* kept = (T*)p.media + (u64)p.media_index[index] * p.media_cols + p.column;
    if ((p.cols | p.media_cols | p.column) % WIDE<T> == 0) {
        move_row<WIDE<T>, MOVE>(row, kept, p.cols);
    } else {
        move_row<1, MOVE>(row, kept, p.cols);
    }
}
