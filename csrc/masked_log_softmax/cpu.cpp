#include "masked_log_softmax/cpu.h"

#include "masked_log_softmax/threshold.h"

using masked_log_softmax::Logits;
using masked_log_softmax::Options;
using masked_log_softmax::Range;
using masked_log_softmax::Targets;

#define KERNELS "masked_log_softmax/cpu_rows.h"
#include "for_each_isa.h"

namespace masked_log_softmax {

#define CALL(function, ...) \
    (logits.bf16 ? FOR_ISA(isa, function<Bf16>)(__VA_ARGS__) : FOR_ISA(isa, function<float>)(__VA_ARGS__))

void extremes(Isa isa, Logits logits, Targets targets, float* extremes, Range rows) {
    CALL(extremes, logits, targets, extremes, rows);
}

void sums(Isa isa, Logits logits, const float* maximum, Options options, float* sums, Range rows) {
    CALL(sums, logits, maximum, options, sums, rows);
}

void extremes_and_sums(Isa isa, Logits logits, Targets targets, Options options, float* extremes, float* sums, Range rows) {
    CALL(extremes_and_sums, logits, targets, options, extremes, sums, rows);
}

void gradient(Isa isa, Logits logits, Targets targets, const float* maximum, const float* factors, Options options,
              void* gradient, Range rows) {
    CALL(gradient, logits, targets, maximum, factors, options, gradient, rows);
}

}  // namespace masked_log_softmax
