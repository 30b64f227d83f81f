// Parameters of every kernel: one plain struct each, which the host fills and passes by value. kernels/src/params/
// defines the same structs in Rust, with shapes, units and the fields that may be null; a test compares size and
// offsets. Pointers come first, so that a struct has no hidden padding; explicit padding is called `reserved`.
//
// T is the element type of activations and weights (float, f16 or bf16), and C that of the cache (T or e4m3). They are
// template arguments of the kernel, so pointers to them are void here.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;

// Number of tokens in a KV block.
constexpr u32 KV_BLOCK = 16;
// Slot of a token whose key and value are not written: a padding row of a captured graph.
constexpr u32 NO_SLOT = 0xffffffffu;
// Maximum size of a row of the cache of latent attention.
constexpr u32 MAX_LATENT_SIZE = 640;

// Bit of a token id that refers to the row of the preceding step which sampled the token.
constexpr u32 DRAWN_TOKEN = 0x80000000u;

// Rows that are rounded to 8 bits, codes * scale, in blocks of 32.
struct RoundedRows {
    i8* codes;      // [rows, cols], -127..127
    float* scales;  // [rows, cols / 32, 2]: scale, and scale * sum of the block's codes
};

// ------------------------------------------------------------------------------------------- dummy weights: cuda/fill.cu

struct FillParams {
    void* out;  // T [count]
    u64 count;
    u32 seed;
    float centre;
    float spread;
    u32 reserved;
};

// ------------------------------------------------------------------------------------------- rows: cuda/rows.cu

struct EmbedParams {
    void* out;          // T [tokens, cols]
    const void* table;  // T [vocabulary, cols]
    const u32* ids;     // [tokens]; DRAWN_TOKEN | r means drawn[r]
    const u32* drawn;   // tokens sampled by the preceding step
    u32 tokens;
    u32 cols;
    u32 vocabulary;
    float scale;
};

struct NormParams {
    void* out;            // T [rows, cols]; may be input, and if residual_after also residual
    const void* input;    // T [rows, cols]
    void* residual;       // T [rows, cols], updated in place or added after the norm; null means none
    const float* weight;  // [cols]
    const float* bias;    // [cols]; null means none
    u32 rows;
    u32 cols;
    float eps;
    float weight_offset;  // value added to the weight
    u32 residual_after;   // 1: out = residual + norm(input); 0: residual += input, out = norm(residual)
    u32 reserved;
};

// A norm that also writes its output rounded.
struct NormCodesParams {
    RoundedRows rounded;
    NormParams norm;  // cols is a multiple of 32
};

struct GluParams {
    void* out;          // T [rows, cols]
    const void* input;  // T [rows, 2 * cols]: gate, then up
    u32 rows;
    u32 cols;
    float alpha;        // factor of the gate in the sigmoid; clamped SwiGLU only
    float limit;        // limit of gate and up; clamped SwiGLU only
};

// A gated activation that also writes its output rounded.
struct GluCodesParams {
    RoundedRows rounded;
    GluParams glu;  // cols is a multiple of 32
};

struct ActParams {
    void* out;          // T [rows, cols]; may be input
    const void* input;  // T [rows, cols]
    u32 rows;
    u32 cols;
};

struct GatherRowsParams {
    void* out;             // T [count, cols]
    const void* input;     // T [., cols]
    const u32* row_index;  // [count]
    u32 count;
    u32 cols;
};

struct GatherColumnsParams {
    void* out;                  // T [rows, cols]
    const void* input;          // T [rows, cols]; not out
    const float* column_index;  // [cols]: whole numbers below cols
    u32 rows;
    u32 cols;
};

struct PoolRowsParams {
    void* out;             // T [count, cols]
    const void* input;     // T [., cols]
    const u32* row_index;  // [count]: the last row of each reduction
    const u32* lens;       // [count]: the number of its rows, at least 1
    u32 count;
    u32 cols;
};

// A run of adjacent entries of the block tables: first entry, first one of the values, number.
struct TableRunsParams {
    u32* tables;        // the block tables of all KV groups
    const u32* runs;    // [count, 3]
    const u32* values;  // new entries, run by run
    u32 count;
    u32 reserved;
};

struct CopyBlocksParams {
    void* cache;       // cache of one KV group
    const u32* pairs;  // [count, 2]: from, to
    u64 block_bytes;
    u32 count;
    u32 reserved;
};

// ------------------------------------------------------------------------------------------- images: cuda/images.cu

struct PatchesParams {
    void* out;              // T [rows, cols]
    const u8* bytes;        // [rows, cols], the channels of a patch one after the other
    const float* channels;  // [cols / channel_cols, 2]: shift and divisor
    u32 rows;
    u32 cols;
    u32 channel_cols;  // number of columns of a channel
    u32 reserved;
};

struct EmbedTapsParams {
    void* out;                 // T [rows, cols], updated in place
    const void* table;         // T [positions, cols]
    const u32* tap_rows;       // [rows, 4]: rows of the table
    const float* tap_weights;  // [rows, 4]
    u32 rows;
    u32 cols;
};

struct MeanRowsParams {
    void* out;          // T [rows, cols]
    const void* input;  // T [rows * merge, cols]
    u32 rows;
    u32 cols;
    u32 merge;          // number of consecutive rows whose mean is a row of the output
    u32 reserved;
};

struct MediaRowsParams {
    void* rows;              // T [., cols]
    void* media;             // T [., media_cols]: the media cache
    const u32* row_index;    // [count]; null means the rows in order
    const u32* media_index;  // [count]
    u32 count;
    u32 cols;
    u32 media_cols;
    u32 column;  // first column of the media cache
};

// ------------------------------------------------------------------------------------------- attention: cuda/qkv_post.cu

struct QkvPostParams {
    void* q;                // T [tokens, q_heads * head_size]
    void* k_cache;          // C: the layer's keys in block 0, [KV_BLOCK, kv_heads, head_size]
    void* v_cache;          // C: the layer's values in block 0
    const void* qkv;        // T [tokens, (q_heads + 2 * kv_heads) * head_size]: q, k, v
    const float* q_weight;  // [head_size], or [q_heads * head_size] if norm_whole_row; null: no norm
    const float* k_weight;  // [head_size] or [kv_heads * head_size]; null: no norm
    const float* cosine;    // [positions, rotary_dim / 2]; null: no rotary embedding
    const float* sine;      // [positions, rotary_dim / 2]
    const u32* positions;   // [streams, position_stride]
    const u32* streams;     // [rotary_dim / 2]: stream of positions that rotates a pair; null means the first
    const u32* slots;       // [tokens]; NO_SLOT: not written
    u64 block_stride;       // elements between the same layer of two blocks
    u32 tokens;
    u32 q_heads;
    u32 kv_heads;
    u32 head_size;
    u32 rotary_dim;
    u32 rope_interleaved;  // 0: pairs (i, i + rotary_dim / 2); 1: pairs (2i, 2i + 1)
    u32 norm_whole_row;    // 0: each head separately; 1: the whole row
    u32 position_stride;   // at least tokens
    float eps;
    float weight_offset;
    float k_scale;         // divisors of keys and values of a cache in e4m3
    float v_scale;
};

// ------------------------------------------------------------------------------------------- attention: cuda/latent_post.cu

struct LatentPostParams {
    void* out;             // T [tokens, q_heads * (rank + rotary_dim)], of which the last rotary_dim of a head are written
    void* cache;           // C: the layer's rows in block 0, [KV_BLOCK, rank + rotary_dim]
    const void* q;         // T [tokens, q_heads * q_size], of which the last rotary_dim of a head are read
    const void* kv;        // T [tokens, rank + rotary_dim]
    const float* weight;   // [rank]
    const float* cosine;   // [positions, rotary_dim / 2]
    const float* sine;     // [positions, rotary_dim / 2]
    const u32* positions;  // [streams, position_stride]
    const u32* streams;    // [rotary_dim / 2]: stream of positions that rotates a pair; null means the first
    const u32* slots;      // [tokens]; NO_SLOT: not written
    u64 block_stride;      // elements between the same layer of two blocks
    u32 tokens;
    u32 q_heads;
    u32 q_size;
    u32 rank;
    u32 rotary_dim;
    u32 rope_interleaved;  // 0: pairs (i, i + rotary_dim / 2); 1: pairs (2i, 2i + 1)
    u32 position_stride;   // at least tokens
    float eps;
    float scale;           // divisor of the rows of a cache in e4m3
    u32 reserved;
};

// ------------------------------------------------------------------------------------------- attention: cuda/attention_*.cu

// Parameters of prefill and of the plain kernel; decode has more.
struct AttentionParams {
    void* out;                // T [tokens, q_heads * value_size]
    const void* q;            // T [tokens, q_heads * head_size]
    const void* k_cache;      // C: the layer's keys in block 0, [KV_BLOCK, kv_heads, head_size]
    const void* v_cache;      // C: the layer's values in block 0; k_cache if they are the first elements of the keys
    const u32* block_table;   // [seats, table_stride]
    const u32* seats;         // [sequences]: row of each sequence in block_table; null means its own index
    const u32* query_start;   // [sequences + 1]
    const u32* seq_lens;      // [sequences]
    const u32* seen_ends;     // [tokens]: place after the last key that a query sees; null means its own. Not with a lookahead
    const u32* plan;          // work of decode and prefill, see kernels/src/plan.rs
    const float* sinks;       // [q_heads]: scores whose share of the softmax is dropped; null means none
    u64 block_stride;         // elements between the same layer of two blocks
    u32 table_stride;
    u32 sequences;
    u32 q_heads;
    u32 kv_heads;
    u32 head_size;
    u32 window;               // number of tokens that a query sees, including its own and later ones; 0 means all
    float scale;              // factor of the scores, with the scale of the keys
    float softcap;            // cap * tanh(score / cap); 0 means none
    u32 lookahead;            // number of tokens after its own that a query sees, as far as they exist
    u32 value_size;           // head_size, or less if values are the first elements of the keys
    float value_scale;        // factor of the output
    u32 tile_heads;           // adjacent heads of a tile of prefill, a divisor of q_heads / kv_heads
};

struct PagedDecodeParams {
    float* partial_out;   // [plan's splits, q_heads, value_size]: outputs of splits before division by their sums
    float* partial_sums;  // [plan's splits, q_heads, 2]: maximum of the scores (base 2), sum of the weights
    u32* tickets;         // [sequences, kv_heads * head_tiles], zero before the first launch, and left zero
    RoundedRows rounded;  // the output, with a value_size that is a multiple of 32; null means none. Not for latents
    AttentionParams attention;
};

// Decode attention that completes the heads of q, k and v itself. It reads q from the output of the projection, and the key and the
// value of a query's own token too, which it writes to the cache.
struct FusedDecodeParams {
    QkvPostParams post;        // q is not written
    PagedDecodeParams decode;  // attention.q is not read
};

// ------------------------------------------------------------------------------------------- linear: cuda/gemm_*.cu, gemv.cu

// O is T, or float for Logits.
// out[i, j] = softcap(scale * (sum over c of input[i, c] * weight[j, c] + bias[j]) + add[i, j])
struct LinearParams {
    const void* input;   // [m, k] T
    const void* weight;  // [n, k] T
    const float* bias;   // [n], or null
    const void* add;     // [m, n] O with rows out_stride apart, or null; may be out itself
    void* out;           // [m, n] O with rows out_stride apart
    u32 m, n;
    u32 k;               // a multiple of 8
    u32 out_stride;      // elements, at least n
    float scale;
    float softcap;       // cap * tanh(x / cap); 0 means none
};

// Like LinearParams, for few rows, with the inputs divided into parts.
struct SkinnyLinearParams {
    float* partial;  // sums of the parts of every tile of outputs: [tiles, parts, sums of a CTA]; not read with one part
    u32* tickets;    // [tiles], 0 before the first launch, and left 0; not read with one part
    LinearParams linear;
    u32 steps;       // stages of 32 inputs of a part
    u32 reserved;
};

// Like LinearParams, with the norm of the input and the activation of the output.
struct FusedLinearParams {
    const float* norm_weight;  // [k], or null if the input is not normalised
    LinearParams linear;       // input: T [m, k] before the norm; out: [m, n] O, or [m, n / 2] T after an activation
    float eps;
    float weight_offset;       // value added to the norm's weight
    u32 pairs;                 // what two outputs become: 0: two outputs; 1, 2, 3: act(gate) * up by silu, gelu, gelu with tanh
    u32 reserved;
};

// ------------------------------------------------------------------------------------------- linear: cuda/quantized.cu

// The planes of a repacked weight [n, k] (see QuantLayout in Rust). Planes that a format lacks are null.
struct QuantWeight {
    const u8* codes;   // the codes, or their lower bits
    const u8* high;    // the upper bits of the codes: Q5_0, Q5_1, Q3_K, Q5_K, Q6_K
    const u8* scales;  // the factors of a super-block's groups, or the exponents, zero points or factors of groups
    const u8* deltas;  // scales, or scales and minima: all but Q4_K, Q5_K, IQ4_XS and MXFP4; of rows for NVFP4
};

// Parameters of rounding activations to 8 bits, codes * scale: in blocks of 32, or to e4m3 by rows or groups of 128.
struct QuantizeParams {
    const void* input;  // [m, k] T
    i8* codes;          // [m, k], -127..127, or the bits of e4m3
    float* scales;      // [m, k / 32, 2]: scale, and scale * sum of the block's codes; [m] for rows in e4m3
    u32 m;
    u32 k;              // a multiple of 32
    u32 stride;         // groups in e4m3: scales are [(k + 127) / 128, stride]
    u32 reserved;
};

// Like LinearParams, with a quantised weight and the activations from quantize_activations.
struct QuantLinearParams {
    QuantWeight weight;   // [n, k]
    const void* input;    // [m, k]: i8 for mmvq, e4m3 for gemm_f8, T for gemm_quant; sums [m, n] of f32 for scale_f8
    const float* scales;  // [m, k / 32, 2], [m] for gemm_f8 and scale_f8
    const float* bias;    // [n], or null
    const void* add;      // [m, n] O with rows out_stride apart, or null; may be out itself
    void* out;            // [m, n] O with rows out_stride apart
    u32 m;                // at most the number of rows of the instance
    u32 n, k;
    u32 out_stride;
    float scale;
    float softcap;
};

// Like QuantLinearParams with an input of T, for few rows, with the inputs divided into parts.
struct SkinnyQuantParams {
    float* partial;             // sums of the parts of every tile of outputs: [tiles, parts, sums of a CTA]; not read with one part
    u32* tickets;               // [tiles], 0 before the first launch, and left 0; not read with one part
    QuantLinearParams product;  // O is T or float; k is a multiple of 256
    u32 steps;                  // stages of 128 inputs of a part
    u32 out_f32;                // 1: O is float
};

// Two products of the same input with weights of different formats, by mmvq_pair.
struct QuantPairParams {
    QuantLinearParams first;
    QuantLinearParams second;
};

// A product whose outputs are gates, then ups, with the gated activation, by mmvq_glu.
struct QuantGluParams {
    RoundedRows rounded;        // the output
    QuantLinearParams product;  // out: [m, n / 2] T; nothing is added, and n is a multiple of 64
    u32 gelu_tanh;              // 0: silu
    u32 reserved;
};

// out[i, c] = scale * weight[r, c], r = row_ids[i] or i
struct DequantizeParams {
    QuantWeight weight;
    const u32* row_ids;  // [rows], or null for the rows 0 .. rows in order; DRAWN_TOKEN | r means drawn[r]
    const u32* drawn;    // tokens sampled by the preceding step
    void* out;           // [rows, k] T
    u32 rows;
    u32 k;
    u32 n;
    float scale;
};

// ------------------------------------------------------------------------------------------- experts: cuda/experts.cu
// A pair t * chosen + j is the j-th expert of token t.

// Maximum number of experts, and number of pairs of one expert in a tile.
constexpr u32 MAX_EXPERTS = 1024, EXPERT_ROWS = 4;

struct RouteParams {
    const void* input;        // T [tokens, cols]
    const float* weight;      // [experts, cols]
    const float* bias;        // [experts], or null
    const float* correction;  // [experts], added to the scores for the choice alone; or null
    float* deltas;            // [tokens, experts], added to the logits and set to 0 again; or null
    u32* picked;              // [tokens, chosen], ascending for each token
    float* weights;           // [tokens, chosen]
    u32 tokens;
    u32 cols;
    u32 experts;
    u32 chosen;
    u32 sigmoid;      // 1: scores are sigmoids; 0: the softmax
    u32 groups;       // number of groups of experts; 0 means no groups
    u32 kept_groups;  // number of groups from which experts are chosen
    u32 best_two;     // 1: a group's value is the sum of its best two; 0: its best
    u32 normalise;    // 1: weights are divided by their sum
    float scale;
};

struct SortExpertsParams {
    const u32* picked;  // [pairs]
    u32* order;         // [pairs]: the pairs by expert
    u32* tiles;         // the number of tiles; then for each its expert, its first place in order, its number of pairs
    u32 pairs;
    u32 experts;
    u32 tile_rows;      // maximum number of pairs of a tile
    u32 reserved;
};

struct ExpertLinearParams {
    QuantWeight quant;   // [experts * n, k], of a quantised weight
    const void* weight;  // T [experts * n, k], of a plain one
    const void* input;   // T, rows input_stride apart
    void* out;           // T [pairs] rows, out_stride apart
    const float* bias;   // rows of out_stride by expert, or null
    const u32* order;
    const u32* tiles;
    u32 n;
    u32 k;
    u32 share;        // number of pairs that read one row of the input
    u32 column;       // first column of out and of a row of the bias
    u32 input_stride;
    u32 out_stride;
    u32 heads;        // number of heads, each of which is the expert of a pair of every token; 0: order and tiles are used
    u32 tokens;       // number of tokens, for heads
    u32 tile_rows;    // maximum number of pairs of a tile of the list
    u32 reserved;
};

struct ExpertSumParams {
    void* out;             // T [tokens, cols]; may be add
    const void* input;     // T [tokens * chosen, cols]
    const float* weights;  // [tokens, chosen]
    const void* add;       // T [tokens, cols], or null
    u32 tokens;
    u32 cols;
    u32 chosen;
    float scale;
};

struct GateRowsParams {
    void* out;         // T [rows, cols], updated in place
    const void* gate;  // T [rows]
    u32 rows;
    u32 cols;
};

// ------------------------------------------------------------------------------------------- adapters: cuda/lora.cu

// Numbers of rows of a tile, of columns of A of a warp, of outputs of a thread, and of inputs of a partial sum; and the
// largest rank.
constexpr u32 LORA_ROWS = 8, LORA_COLUMNS = 4, LORA_OUTPUTS = 4, LORA_PIECE = 512, LORA_MAX_RANK = 256;
constexpr u32 LORA_TILE_WORDS = 4, LORA_PAIRS_THREADS = 256;

// The matrices of an adapter for a part of a weight.
struct LoraPart {
    u64 a;          // offset in bytes: T [rank, k]; of a table of embeddings T [k, rank]
    u64 b;          // offset in bytes: T [rank, columns], rows padded to a multiple of LORA_OUTPUTS
    u32 rank;       // 0: the adapter has no matrices for the part
    float scaling;  // factor of A x
    u32 first;      // first column of the output
    u32 columns;
};

struct LoraParams {
    void* out;                 // O, rows out_stride apart
    const void* input;         // T [., k]
    float* partial;            // [most tiles, splits, parts * rank, LORA_ROWS]: sums of A x
    const u8* matrices;        // the matrices of all adapters
    const LoraPart* parts_of;  // [slots, part_stride], from the site's first part on
    const u32* tiles;          // the number of tiles; then for each its slot, its expert, its first place in rows, its number of rows
    const u32* rows;           // rows with adapters, tile by tile
    const u32* ids;            // ids of tokens by row, for a table of embeddings
    const u32* drawn;          // tokens sampled by the preceding step
    u32 k;                     // a multiple of 8; the number of rows of a table
    u32 out_stride;
    u32 parts;                 // number of parts of the site's weight, or of each of its experts
    u32 part_stride;           // number of parts of all sites
    u32 rank;                  // largest rank of an adapter in a slot
    u32 splits;                // number of partial sums of a column: one for each LORA_PIECE inputs, or 1 for their sum
    float scale;
    u32 share;                 // number of rows that read one row of the input
};

struct LoraPairsParams {
    const u32* picked;         // [tokens, chosen]
    const u32* adapted_tiles;  // tiles of the tokens that have adapters, as in LoraParams
    const u32* adapted_rows;
    u32* counts;               // [experts, slots], overwritten
    u32* tiles;                // tiles of pairs of one adapter and one expert, as in LoraParams
    u32* rows;                 // the pairs, tile by tile
    u32 chosen;
    u32 experts;
    u32 slots;
    u32 reserved;
};

// ------------------------------------------------------------------------------------------- sampling: cuda/sampling.cu, cuda/logprobs.cu

// Parameters of one row for the sampler.
struct SamplingRow {
    u64 seed;
    u32 output_position;             // seed and output_position determine the random number
    u32 flags;                       // SAMPLING_*
    float temperature;               // 0, negative or NaN means greedy
    u32 top_k;                       // 0 keeps all
    float top_p;                     // 1 keeps all
    float min_p;                     // 0 keeps all
    float presence_penalty;
    float frequency_penalty;
    float repetition_penalty;        // 1 means none
    u32 forced;                      // forced token, or SAMPLING_NONE
    u32 mask_row;                    // row of masks, or SAMPLING_NONE
    u32 bias_start, bias_end;        // entries of bias_ids and bias_values
    u32 forbidden_start, forbidden_end;  // entries of forbidden_ids
    u32 counts_start, counts_end;    // entries of count_ids and count_times
    u32 listed_start, listed_end;    // entries of listed_ids: tokens to report instead of the most likely ones
    u32 top;                         // number of tokens to report beside the row's own, at most SAMPLING_MAX_TOP
    u32 pending;                     // row of the preceding step whose token counts once more, or SAMPLING_NONE
    u32 reserved;
};

// What a launch leaves to the next about a row. The first two fields are places in the order of tokens (sampling.h).
struct SamplingState {
    u64 best;           // the most likely token after bias, masks and penalties
    u64 raw_best;       // the most likely token of the model; for rows with log-probabilities
    u64 mass_before_k;  // sum of the weights of the bins before k_bin
    u64 mass_before;    // sum of the weights of the bins before `first`
    double log_sum;     // logarithm of the sum of the model's weights
    u32 k_bin;          // bin in which top-k ends, or SAMPLING_NONE
    u32 k_rank;         // number of tokens of this bin that top-k keeps
    u32 first, last;    // bins in one of which the kept tokens end
    u32 ticket;         // 0 before the first launch, and left 0
    u32 listed;         // number of entries of the row's list, 0 before the first launch, and left 0
};

struct SamplingParams {
    const float* logits;        // [rows, vocab] with rows row_stride apart, from the model
    float* adjusted;            // scratch memory of the same shape for rows whose logits are adjusted
    const SamplingRow* rows_of; // [rows]
    const u32* masks;           // [.., mask_words]: bit id % 32 of word id / 32 allows a token
    const u32* bias_ids;
    const float* bias_values;
    const u32* forbidden_ids;   // each once per row
    const u32* count_ids;       // tokens of prompt or output, each once per row
    const u32* count_times;     // number of times generated; 0 if only in the prompt
    const u32* listed_ids;
    u32* ids;                   // [rows]: sampled tokens; before the draw, those of the preceding step
    u32* status;                // [rows]: SAMPLING_STATUS_*
    float* logprobs;            // [rows]: log-probabilities of the tokens
    u32* ranks;                 // [rows]: ranks of the tokens, 1 for the most likely
    u32* top_counts;            // [rows]: numbers of entries of top_ids and top_logprobs
    u32* top_ids;               // [rows, top_stride], most likely first, ties by id
    float* top_logprobs;        // [rows, top_stride]
    SamplingState* states;      // [rows]
    u64* parts;                 // [rows, 2, segments]: numbers of each segment, overwritten
    u64* masses;                // [rows, SAMPLING_BINS]: sums of weights, 0 before the first launch, and left 0
    u32* counts;                // [rows, SAMPLING_BINS]: numbers of tokens, 0 before the first launch, and left 0
    u64* lists;                 // [rows, SAMPLING_LIST]: tokens of some bins, overwritten
    u32 rows, vocab;
    u32 row_stride;             // elements, a multiple of 4
    u32 mask_words;             // ceil(vocab / 32)
    u32 top_stride;
    u32 segment;                // number of tokens of a row that a CTA reads, a multiple of SAMPLING_TILE
};

// Flags of a SamplingRow.
constexpr u32 SAMPLING_ADJUST = 1;    // bias, forbidden tokens, mask or counts are given
constexpr u32 SAMPLING_LOGPROBS = 2;  // log-probabilities are reported
constexpr u32 SAMPLING_PADDING = 4;   // nothing is computed or written

// No token was left above minus infinity, so the most likely allowed one was taken.
constexpr u32 SAMPLING_STATUS_EXHAUSTED = 1;

constexpr u32 SAMPLING_NONE = 0xffffffffu;
// Maximum number of tokens that a row may report.
constexpr u32 SAMPLING_MAX_TOP = 1024;
// Number of tokens that a CTA loads at once.
constexpr u32 SAMPLING_TILE = 1024;
// Number of parts into which the tokens of a row are divided by their logits.
constexpr u32 SAMPLING_BINS = 1024;
// Maximum number of tokens in a row's list.
constexpr u32 SAMPLING_LIST = 2048;
