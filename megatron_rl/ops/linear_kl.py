"""Distillation from a teacher's hidden states: KL divergences of two heads, chunk by chunk over tokens.

With s and t the log-softmaxes of student and teacher, z the student's logits (both divided by the temperature), m the
mixture's and E the mean under the student:

    forward  KL(teacher || student) = sum e^t (t - s)             d/dz = e^s - e^t
    reverse  KL(student || teacher) = E[s - t]                    d/dz = e^s ((s - t) - E[s - t])
    jensen_shannon  mix sum e^t (t - m) + (1 - mix) E[s - m]      d/dz = (1 - mix) e^s ((s - m) - E[s - m])

Forward is Hinton et al. (arXiv 1503.02531) without the factor of the squared temperature; reverse is MiniLLM's (arXiv
2306.08543); jensen_shannon is eq. 1 of GKD (Agarwal et al., arXiv 2306.13649), as TRL's generalized_jsd_loss has it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist

from megatron_rl.ops.token_terms import Heads, check_head, check_numbers, log_sum_of_ranks, of_tokens, require

Direction = Literal["forward", "reverse", "jensen_shannon"]
_OP = "linear_kl"
_PADDING = -1e30
"""A logit without probability. It is finite, as the difference of two of -inf would be NaN."""


def linear_kl(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    *,
    temperature: float = 1.0,
    direction: Direction = "forward",
    tp_group: dist.ProcessGroup | None = None,
    mix: float = 0.5,
    vocab_size: int | None = None,
    chunk_tokens: int = 2048,
    fp32_logits: bool = False,
) -> torch.Tensor:
    """Divergence in nats of each token, [T] fp32 (fp64 where an argument is), differentiable in hidden and weight alone.

    hidden [T, d], weight [V / tp, d]; teacher_hidden [T, dt], teacher_weight [V / tp, dt]: fp32, bf16 or fp64, the teacher's
    width and type its own. Logits of both are divided by temperature. Hinton et al. and ModelOpt's LogitsDistillationLoss
    multiply the result by its square, this does not.

    direction: forward is KL(teacher || student), reverse KL(student || teacher). jensen_shannon is, with
    m = mix teacher + (1 - mix) student, mix KL(teacher || m) + (1 - mix) KL(student || m): mix is the teacher's weight in
    both places, TRL's beta; 0 < mix < 1. Near 0 it is mix times forward, near 1 it is 1 - mix times reverse (TRL
    puts forward and reverse themselves at 0 and 1).

    The logits of more than chunk_tokens tokens never exist, in the forward or in the backward, the teacher's neither. Where
    the tokens are several chunks the backward multiplies again: six products of the head's size in all, else four.
    The gradient of weight is summed over chunks in fp32.

    With tp_group each rank holds an equal share of the rows of both weights, and the gradient of hidden is this rank's
    part: their sum is the caller's, as with Megatron's column-parallel layers. vocab_size: the model's own; columns
    beyond it (Megatron's padding) belong to no softmax. fp32_logits: as in linear_log_probs, for whichever head is bf16.

    NaN or infinite logits give NaN for their token. Errors: ValueError naming the argument.
    """
    check_head(_OP, hidden, weight, ("hidden", "weight"))
    check_head(_OP, teacher_hidden, teacher_weight, ("teacher_hidden", "teacher_weight"))
    for name, ours, theirs in (("hidden", hidden, teacher_hidden), ("weight", weight, teacher_weight)):
        rows = f"{name} has {len(ours)} rows, teacher_{name} {len(theirs)}"
        require(_OP, len(ours) == len(theirs), f"{rows}: must be the same {'tokens' if name == 'hidden' else 'ids'}")
    devices = f"hidden is on {hidden.device}, teacher_hidden on {teacher_hidden.device}"
    require(_OP, hidden.device == teacher_hidden.device, devices)
    require(_OP, direction in get_args(Direction), f"direction {direction!r} must be one of {get_args(Direction)}")
    require(_OP, 0 < temperature < math.inf, f"temperature {temperature} must be above 0, and finite")
    require(_OP, 0 < mix < 1, f"mix {mix} must be above 0 and below 1; forward and reverse are directions of their own")
    check_numbers(_OP, vocab_size, chunk_tokens)
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, teacher_hidden.dtype), torch.float32)
    heads = Heads(temperature, tp_group, vocab_size, chunk_tokens, fp32_logits, dtype, _PADDING)
    terms = _Divergence(direction, mix, tp_group)
    return of_tokens(hidden, weight, heads, terms, teacher_hidden, teacher_weight)


def kl_reference(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    direction: Direction = "forward",
    mix: float = 0.5,
) -> torch.Tensor:
    """The definition in plain differentiable torch over whole logits [T, V]: [T]."""
    student, teacher = ((x / temperature).log_softmax(-1) for x in (logits, teacher_logits.detach()))
    if direction == "forward":
        return (teacher.exp() * (teacher - student)).sum(-1)
    if direction == "reverse":
        return (student.exp() * (student - teacher)).sum(-1)
    mixture = torch.logaddexp(student + math.log1p(-mix), teacher + math.log(mix))
    of_teacher = (teacher.exp() * (teacher - mixture)).sum(-1)
    return mix * of_teacher + (1 - mix) * (student.exp() * (student - mixture)).sum(-1)


@dataclass(frozen=True)
class _Divergence:
    """As TokenTerms. What is kept of a token: the logarithms of both softmaxes' denominators, and E."""

    direction: Direction
    mix: float
    tp_group: dist.ProcessGroup | None

    def values(self, logits: list[torch.Tensor], chunk: slice) -> tuple[torch.Tensor, torch.Tensor]:
        log_sums = log_sum_of_ranks(torch.stack([z.logsumexp(1) for z in logits], 1), self.tp_group)
        student, teacher = (z.sub_(log_sum[:, None]) for z, log_sum in zip(logits, log_sums.unbind(1), strict=True))
        difference = teacher - student
        if self.direction == "forward":
            parts = torch.stack([difference.mul_(teacher.exp_()).sum(1)])
        elif self.direction == "reverse":
            parts = -torch.stack([difference.mul_(student.exp_()).sum(1)])
        else:
            above = self._mixture_above_student(difference)
            of_teacher = difference.sub_(above).mul_(teacher.exp_()).sum(1)
            parts = torch.stack([-above.mul_(student.exp_()).sum(1), of_teacher])
        if self.tp_group is not None:
            dist.all_reduce(parts, group=self.tp_group)
        mean = parts[0]
        value = mean if len(parts) == 1 else self.mix * parts[1] + (1 - self.mix) * mean
        return value, torch.cat([log_sums, mean[:, None]], 1)

    def gradient(self, logits: list[torch.Tensor], chunk: slice, kept: torch.Tensor) -> torch.Tensor:
        *log_sums, mean = kept.unbind(1)
        student, teacher = (z.sub_(log_sum[:, None]) for z, log_sum in zip(logits, log_sums, strict=True))
        if self.direction == "forward":
            return student.exp_().sub_(teacher.exp_())
        below = torch.sub(teacher, student, out=teacher)
        if self.direction == "jensen_shannon":
            below = self._mixture_above_student(below).mul_(1 - self.mix)
            mean = (1 - self.mix) * mean
        return below.add_(mean[:, None]).neg_().mul_(student.exp_())

    def _mixture_above_student(self, difference: torch.Tensor) -> torch.Tensor:
        """The mixture's m - s from t - s, without the rounding of s: about zero where the two are the same."""
        own = difference.new_tensor(math.log1p(-self.mix))
        above = difference + math.log(self.mix)
        return torch.logaddexp(above, own, out=above)
