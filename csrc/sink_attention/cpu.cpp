#include "sink_attention/cpu.h"

#include <algorithm>

namespace {

constexpr int64_t LANE_BLOCK = 64;  // queries times heads per block
constexpr int64_t KEY_BLOCK = 64;
constexpr int64_t CHUNK = 512;  // positions per task of the backward

}  // namespace

using sink_attention::Problem;
using sink_attention::QueryBlock;
using sink_attention::Tile;

#define KERNELS "sink_attention/cpu_blocks.h"
#include "for_each_isa.h"

namespace sink_attention {

#define CALL(function, ...) \
    (problem.bf16 ? FOR_ISA(isa, function<Bf16>)(__VA_ARGS__) : FOR_ISA(isa, function<float>)(__VA_ARGS__))

int64_t queries_per_block(const Problem& problem) {
    return std::max<int64_t>(1, LANE_BLOCK / (problem.heads / problem.kv_heads));
}

std::vector<QueryBlock> query_blocks(const Problem& problem, const int64_t* cu_q, const int64_t* cu_k, int64_t sequences) {
    const int64_t step = queries_per_block(problem);
    std::vector<QueryBlock> blocks;
    for (int64_t s = 0; s < sequences; ++s) {
        const int64_t queries = cu_q[s + 1] - cu_q[s], before = cu_k[s + 1] - cu_k[s] - queries;
        for (int64_t first = 0; first < queries; first += step)
            for (int64_t head = 0; head < problem.kv_heads; ++head)
                blocks.push_back({cu_q[s] + first, std::min(step, queries - first), before + first, cu_k[s], head});
    }
    const auto keys = [&](const QueryBlock& b) {
        return problem.window ? std::min(b.position, problem.window) : b.position;
    };
    std::stable_sort(blocks.begin(), blocks.end(), [&](const auto& a, const auto& b) { return keys(a) > keys(b); });
    return blocks;
}

std::vector<std::vector<std::vector<Tile>>> backward_rounds(const Problem& problem, const int64_t* cu_q, const int64_t* cu_k,
                                                            int64_t sequences) {
    const int64_t step = queries_per_block(problem);
    std::vector<std::vector<std::vector<Tile>>> rounds;
    for (int64_t s = 0; s < sequences; ++s) {
        const int64_t queries = cu_q[s + 1] - cu_q[s], keys = cu_k[s + 1] - cu_k[s], before = keys - queries;
        for (int64_t chunk = 0; chunk * CHUNK < keys && queries; ++chunk) {  // chunks of keys
            const int64_t key_begin = chunk * CHUNK, key_end = std::min(keys, key_begin + CHUNK);
            for (int64_t round = 0; (chunk + round) * CHUNK < keys; ++round) {
                const int64_t begin = std::max(before, (chunk + round) * CHUNK);
                const int64_t end = std::min(keys, (chunk + round + 1) * CHUNK);
                if (problem.window && begin - problem.window >= key_end) break;
                for (int64_t head = 0; head < problem.kv_heads; ++head) {
                    std::vector<Tile> task;
                    for (int64_t position = begin; position < end; position += step) {
                        const int64_t count = std::min(step, end - position);
                        const int64_t oldest = problem.window ? std::max<int64_t>(0, position - problem.window + 1) : 0;
                        const Tile tile{{cu_q[s] + position - before, count, position, cu_k[s], head},
                                        std::max(key_begin, oldest), std::min(key_end, position + count)};
                        if (tile.key_begin < tile.key_end) task.push_back(tile);
                    }
                    if (task.empty()) continue;
                    if (static_cast<int64_t>(rounds.size()) <= round) rounds.resize(round + 1);
                    rounds[round].push_back(std::move(task));
                }
            }
        }
    }
    return rounds;
}

int64_t scratch_floats(const Problem& problem) {
    const int64_t lanes = queries_per_block(problem) * (problem.heads / problem.kv_heads) + 16;
    const int64_t dim = problem.dim + problem.value_dim + 32, all = 3 * dim * lanes + KEY_BLOCK * (2 * lanes + 2 * dim);
    return all + 8 * lanes + 16 * 16;
}

void forward(Isa isa, const Problem& problem, const QueryBlock& block, void* out, float* lse, float* scratch) {
    CALL(forward, problem, block, out, lse, scratch);
}

void delta(Isa isa, const Problem& problem, const void* grad, const void* out, float* delta, int64_t begin, int64_t end) {
    CALL(delta, problem, grad, out, delta, begin, end);
}

void backward(Isa isa, const Problem& problem, const Tile& tile, const void* grad, const float* lse, const float* delta,
              float* grad_q, float* grad_k, float* grad_v, float* scratch) {
    CALL(backward, problem, tile, grad, lse, delta, grad_q, grad_k, grad_v, scratch);
}

}  // namespace sink_attention
