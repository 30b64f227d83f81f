// Compares the logits of llama.cpp with those of PyTorch. benches/peers/agreement/run.py compiles and runs it.
//
// Usage: llama MODEL FLASH_ATTENTION DATA
// DATA: N, T and TOP, then ids[N], starts[T + 1], top_ids[N][TOP] (32-bit integers), top_logprobs[N][TOP] (32-bit floats).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "llama.h"

namespace {

// Difference of the log-probabilities of the two most likely tokens above which the first should be the same.
constexpr float CLEAR_MARGIN = 0.1f;

template <class T>
std::vector<T> read(std::FILE* file, size_t count) {
    std::vector<T> values(count);
    if (std::fread(values.data(), sizeof(T), count, file) != count) {
        std::fprintf(stderr, "the data ends too soon\n");
        std::exit(1);
    }
    return values;
}

struct Tally {
    size_t positions = 0, clear = 0, agreeing = 0;
    std::vector<double> differences;

    void add(const float* logits, int vocabulary, const int32_t* ids, const float* logprobs, int top) {
        positions += 1;
        const float largest = *std::max_element(logits, logits + vocabulary);
        double sum = 0;
        for (int id = 0; id < vocabulary; id++) sum += std::exp(double(logits[id]) - largest);
        for (int i = 0; i < top; i++) {
            differences.push_back(std::abs(double(logits[ids[i]]) - largest - std::log(sum) - logprobs[i]));
        }
        if (logprobs[0] - logprobs[1] > CLEAR_MARGIN) {
            clear += 1;
            agreeing += logits[ids[0]] == largest;
        }
    }

    void print() {
        std::sort(differences.begin(), differences.end());
        const auto quantile = [&](double q) { return differences[size_t((differences.size() - 1) * q)]; };
        std::printf("%zu positions; top-1 the same at %zu of the %zu with a margin above %g (%.2f %%); difference of "
                    "log-probabilities: median %.1e, 99th percentile %.1e, largest %.1e\n",
                    positions, agreeing, clear, CLEAR_MARGIN, 100.0 * agreeing / clear, quantile(0.5), quantile(0.99),
                    quantile(1.0));
    }
};

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) return 2;
    std::FILE* file = std::fopen(argv[3], "rb");
    if (!file) return 2;
    const auto sizes = read<int32_t>(file, 3);
    const int positions = sizes[0], texts = sizes[1], top = sizes[2];
    const auto ids = read<int32_t>(file, positions);
    const auto starts = read<int32_t>(file, texts + 1);
    const auto top_ids = read<int32_t>(file, size_t(positions) * top);
    const auto top_logprobs = read<float>(file, size_t(positions) * top);

    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    llama_backend_init();
    llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) return 1;
    int longest = 0;
    for (int t = 0; t < texts; t++) longest = std::max(longest, starts[t + 1] - starts[t]);
    llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = params.n_ubatch = longest + 8;
    params.flash_attn_type =
        std::strcmp(argv[2], "on") == 0 ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context* context = llama_init_from_model(model, params);
    if (!context) return 1;
    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));

    Tally tally;
    llama_batch batch = llama_batch_init(longest, 0, 1);
    for (int t = 0; t < texts; t++) {
        llama_memory_clear(llama_get_memory(context), true);
        batch.n_tokens = starts[t + 1] - starts[t];
        for (int i = 0; i < batch.n_tokens; i++) {
            batch.token[i] = ids[starts[t] + i];
            batch.pos[i] = i;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = true;
        }
        if (llama_decode(context, batch) != 0) return 1;
        for (int i = 0; i < batch.n_tokens; i++) {
            const size_t at = size_t(starts[t] + i) * top;
            tally.add(llama_get_logits_ith(context, i), vocabulary, &top_ids[at], &top_logprobs[at], top);
        }
    }
    tally.print();
    llama_batch_free(batch);
    llama_free(context);
    llama_model_free(model);
}
