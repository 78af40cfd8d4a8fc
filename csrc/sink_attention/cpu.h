// Causal attention with sinks on the CPU, block of queries by block of queries. The formulas are in
// megatron_rl/ops/sink_attention.py.
#pragma once

#include <vector>

#include "isa.h"

namespace sink_attention {

// Packed tensors: q [Tq, H, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv], all contiguous and of one type; sinks [H] or null.
struct Problem {
    const void *q, *k, *v;
    const float* sinks;
    bool bf16;  // else fp32
    int64_t q_tokens, heads, kv_heads, dim, value_dim;
    float scale;
    int64_t window;  // 0: none
};

// Queries that are worked on together. Positions are those of the sequence's keys; the last query stands at the last key.
struct QueryBlock {
    int64_t query, count;  // first query's row in q
    int64_t position;      // its position in its sequence
    int64_t key;           // row of the sequence's first key in k
    int64_t kv_head;
};

// A block of queries and the keys [key_begin, key_end) of its sequence (positions) that one task of the backward works on.
struct Tile {
    QueryBlock queries;
    int64_t key_begin, key_end;
};

int64_t queries_per_block(const Problem& problem);

// All blocks of a pack, those with the most keys first. cu_q, cu_k [sequences + 1].
std::vector<QueryBlock> query_blocks(const Problem& problem, const int64_t* cu_q, const int64_t* cu_k, int64_t sequences);

// The backward's tasks in rounds. Tasks of a round write to different rows, and what is added to one row is added round by
// round: the result does not depend on the threads.
std::vector<std::vector<std::vector<Tile>>> backward_rounds(const Problem& problem, const int64_t* cu_q, const int64_t* cu_k,
                                                            int64_t sequences);

// Floats of scratch memory that forward and backward need, 64-byte aligned.
int64_t scratch_floats(const Problem& problem);

// out [Tq, H, Dv] of q's type, lse [H, Tq]: log of the softmax's denominator, the sink included.
void forward(Isa isa, const Problem& problem, const QueryBlock& block, void* out, float* lse, float* scratch);

// delta [H, Tq] = sum over Dv of grad * out, for the queries [begin, end).
void delta(Isa isa, const Problem& problem, const void* grad, const void* out, float* delta, int64_t begin, int64_t end);

// Adds a tile's part to grad_q [Tq, H, D], grad_k [Tk, Hkv, D] and grad_v [Tk, Hkv, Dv], all fp32.
void backward(Isa isa, const Problem& problem, const Tile& tile, const void* grad, const float* lse, const float* delta,
              float* grad_q, float* grad_k, float* grad_v, float* scratch);

}  // namespace sink_attention
