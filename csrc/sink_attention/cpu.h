// Causal attention with sinks on the CPU, block of queries by block of queries. The formulas are in
// megatron_rl/ops/sink_attention.py.
#pragma once

#include <vector>

#include "isa.h"

namespace sink_attention {

// Packed tensors: q [Tq, H, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv], all contiguous, with one element type; sinks [H] or null.
struct Problem {
    const void *q, *k, *v;
    const float* sinks;
    bool bf16;  // else fp32
    int64_t q_tokens, heads, kv_heads, dim, value_dim;
    float scale;
    int64_t window;  // 0: none
};

// Queries that are processed together. Positions count the keys of the sequence; the last query is at the last key.
struct QueryBlock {
    int64_t query, count;  // row of the first query in q
    int64_t position;      // position of the first query in its sequence
    int64_t key;           // row of the first key of the sequence in k
    int64_t kv_head;
};

// One task of the backward: a block of queries and the keys [key_begin, key_end) of its sequence (positions).
struct Tile {
    QueryBlock queries;
    int64_t key_begin, key_end;
};

int64_t queries_per_block(const Problem& problem);

// All blocks of the packed sequences, blocks with the most keys first. cu_q, cu_k [sequences + 1].
std::vector<QueryBlock> query_blocks(const Problem& problem, const int64_t* cu_q, const int64_t* cu_k, int64_t sequences);

// The tasks of the backward in rounds. The tasks of a round write to different rows, and additions to a row happen round by
// round, so that the result does not depend on the threads.
std::vector<std::vector<std::vector<Tile>>> backward_rounds(const Problem& problem, const int64_t* cu_q, const int64_t* cu_k,
                                                            int64_t sequences);

// Number of floats of scratch memory (64-byte aligned) for forward and backward.
int64_t scratch_floats(const Problem& problem);

// Writes out [Tq, H, Dv] in the type of q, and lse [H, Tq]: log of the softmax denominator, including the sink.
void forward(Isa isa, const Problem& problem, const QueryBlock& block, void* out, float* lse, float* scratch);

// delta [H, Tq] = sum over Dv of grad * out, for the queries [begin, end).
void delta(Isa isa, const Problem& problem, const void* grad, const void* out, float* delta, int64_t begin, int64_t end);

// Adds a tile's part to grad_q [Tq, H, D], grad_k [Tk, Hkv, D] and grad_v [Tk, Hkv, Dv], all fp32.
void backward(Isa isa, const Problem& problem, const Tile& tile, const void* grad, const float* lse, const float* delta,
              float* grad_q, float* grad_k, float* grad_v, float* scratch);

}  // namespace sink_attention
