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

from megatron_rl.ops.device import LateChecks
from megatron_rl.ops.token_terms import (
    Heads,
    check_head,
    check_numbers,
    first_column,
    log_sum_of_ranks,
    of_tokens,
    require,
)

Direction = Literal["forward", "reverse", "jensen_shannon"]
_HEADS_OP = "linear_kl"
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
    check_head(_HEADS_OP, hidden, weight, ("hidden", "weight"))
    check_head(_HEADS_OP, teacher_hidden, teacher_weight, ("teacher_hidden", "teacher_weight"))
    for name, ours, theirs in (("hidden", hidden, teacher_hidden), ("weight", weight, teacher_weight)):
        rows = f"{name} has {len(ours)} rows, teacher_{name} {len(theirs)}"
        require(
            _HEADS_OP, len(ours) == len(theirs), f"{rows}: must be the same {'tokens' if name == 'hidden' else 'ids'}"
        )
    devices = f"hidden is on {hidden.device}, teacher_hidden on {teacher_hidden.device}"
    require(_HEADS_OP, hidden.device == teacher_hidden.device, devices)
    require(
        _HEADS_OP, direction in get_args(Direction), f"direction {direction!r} must be one of {get_args(Direction)}"
    )
    require(_HEADS_OP, 0 < temperature < math.inf, f"temperature {temperature} must be above 0, and finite")
    require(
        _HEADS_OP,
        0 < mix < 1,
        f"mix {mix} must be above 0 and below 1; forward and reverse are directions of their own",
    )
    check_numbers(_HEADS_OP, vocab_size, chunk_tokens)
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


# -- linear topk kl ------------------------------------------------------------------------------------------------------
# Distillation from recorded log-probs of a teacher's likeliest tokens: KL over these and one bucket for all others.
# With a the teacher's probabilities of the k + 1 classes, b the student's, z the student's logits and q its softmax over the
# tokens of the bucket alone:
#     forward  KL(a || b) = sum a log(a / b)        c = b - a
#     reverse  KL(b || a) = sum b log(b / a)        c = b (log(b / a) - KL)
# dKL/dz of a token that has its own class is that class's c; of one in the bucket, the bucket's c times q.


TopkDirection = Literal["forward", "reverse"]
_TOPK_OP = "linear_topk_kl"
_NONE = (-100, -1)
_MOST = 1e-3
"""Tolerance by which a teacher's recorded probabilities may be above one: rounding of bf16 logits' softmax stays below.
"""


def linear_topk_kl(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    token_ids: torch.Tensor,
    log_probs: torch.Tensor,
    *,
    direction: TopkDirection = "forward",
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    chunk_tokens: int = 2048,
    fp32_logits: bool = False,
) -> torch.Tensor:
    """KL in nats of each token, [T] fp32 (fp64 where hidden is), between k + 1 classes; differentiable in hidden and weight.

    token_ids [T, k] int64: ids of the whole vocabulary, in any order, none twice in a row; -100 or -1: none, and its
    log-prob is not looked at; an id whose log-prob is -inf counts as none. log_probs [T, k] fp32 or fp64: the teacher's,
    over its whole vocabulary at temperature 1, which is why there is no temperature here. All other tokens are one class,
    the bucket, whose probability is what is left to one.

    direction: forward is KL(teacher || student), reverse KL(student || teacher). By the data-processing inequality the KL
    between classes is at most that between the tokens (what `linear_kl` gives at temperature 1): it is a lower bound, and
    the same where k is the vocabulary, or where both spread the bucket's probability alike. It says nothing of how the
    student spreads the bucket's probability.

    A teacher's bucket of zero or less (log-probs are rounded) has no part in forward; in reverse, where the KL would
    be infinite, it counts as 8 units of rounding of log_probs (1e-6 in fp32).

    hidden [T, d], weight [V / tp, d], tp_group, vocab_size, chunk_tokens, fp32_logits, gradients: as in linear_kl.

    Errors: ValueError naming the argument, or the row that has an id outside the vocabulary or twice, or probabilities whose
    sum is above one; a GPU is waited for once.
    """
    check_head(_TOPK_OP, hidden, weight, ("hidden", "weight"))
    shapes = f"hidden {list(hidden.shape)}, token_ids {list(token_ids.shape)}, log_probs {list(log_probs.shape)}"
    fit = token_ids.ndim == 2 and token_ids.shape == log_probs.shape and len(token_ids) == len(hidden)
    require(_TOPK_OP, fit, f"{shapes} must be [T, H], [T, k], [T, k]")
    require(_TOPK_OP, token_ids.dtype == torch.int64, f"token_ids are {token_ids.dtype}, must be int64")
    precise = log_probs.dtype in (torch.float32, torch.float64)
    require(_TOPK_OP, precise, f"log_probs are {log_probs.dtype}, must be fp32 or fp64")
    devices = f"hidden is on {hidden.device}, token_ids on {token_ids.device}, log_probs on {log_probs.device}"
    require(_TOPK_OP, hidden.device == token_ids.device == log_probs.device, devices)
    require(
        _TOPK_OP,
        direction in get_args(TopkDirection),
        f"direction {direction!r} must be one of {get_args(TopkDirection)}",
    )
    check_numbers(_TOPK_OP, vocab_size, chunk_tokens)
    ids, classes = _classes(token_ids, log_probs.detach(), direction)
    _check_rows(ids, classes, vocab_size or len(weight) * (tp_group.size() if tp_group is not None else 1))
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    heads = Heads(1.0, tp_group, vocab_size, chunk_tokens, fp32_logits, dtype, -torch.inf)
    return of_tokens(hidden, weight, heads, _Buckets(direction, ids, classes, tp_group))


def _classes(
    token_ids: torch.Tensor, log_probs: torch.Tensor, direction: TopkDirection
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [T, k], -1: none; the teacher's log-probs of the classes [T, k + 1] fp64, the bucket last, -inf: none."""
    none = (token_ids == _NONE[0]) | (token_ids == _NONE[1]) | (log_probs == -torch.inf)
    logs = torch.where(none, -torch.inf, log_probs.double())
    rest = 1 - logs.exp().sum(1, keepdim=True)
    least = 8 * torch.finfo(log_probs.dtype).eps if direction == "reverse" else 0.0
    return torch.where(none, -1, token_ids), torch.cat([logs, rest.clamp(min=least).log()], 1)


def _check_rows(ids: torch.Tensor, classes: torch.Tensor, vocabulary: int) -> None:
    outside = ((ids < -1) | (ids >= vocabulary)).any(1)
    ordered = ids.sort(1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
    total = classes[:, :-1].exp().sum(1)
    checks = LateChecks()
    for wrong, what in (
        (outside, f"has an id outside the vocabulary of {vocabulary} ({_NONE[0]} or {_NONE[1]}: none)"),
        (twice, "has an id twice"),
        (total > 1 + _MOST, "has probabilities whose sum is above one"),
    ):
        checks.add(wrong, lambda row, what=what: ValueError(f"{_TOPK_OP}: row {row} of token_ids and log_probs {what}"))
    checks.look()


@dataclass(frozen=True)
class _Buckets:
    """As TokenTerms. What is kept of a token: the gradient at each class, and the log of the bucket's sum of exponentials."""

    direction: TopkDirection
    ids: torch.Tensor
    classes: torch.Tensor
    tp_group: dist.ProcessGroup | None

    def values(self, logits: list[torch.Tensor], chunk: slice) -> tuple[torch.Tensor, torch.Tensor]:
        (bucket,) = logits
        column, here = self._columns(chunk, bucket.shape[1])
        own = torch.where(here, bucket.gather(1, column), -torch.inf)
        self._leave_out(bucket, column, here)
        logs = log_sum_of_ranks(torch.cat([own, bucket.logsumexp(1, keepdim=True)], 1), self.tp_group)
        # The classes are few: fp64 costs nothing.
        student, teacher = logs.double().log_softmax(1), self.classes[chunk]
        # A class that the student cannot have is left of the teacher's by rounding: the bucket of an empty rest.
        teacher = torch.where(student == -torch.inf, -torch.inf, teacher)
        ratio = torch.where(teacher == -torch.inf, 0.0, teacher - student)
        if self.direction == "forward":
            value = (teacher.exp() * ratio).sum(1)
            slope = student.exp() - teacher.exp()
        else:  # the teacher has all that the student has
            value = -(student.exp() * ratio).sum(1)
            slope = -student.exp() * (ratio + value[:, None])
        log_sum = torch.where(logs[:, -1:] == -torch.inf, 0.0, logs[:, -1:])  # nothing is in it
        return value.to(bucket.dtype), torch.cat([slope.to(bucket.dtype), log_sum], 1)

    def gradient(self, logits: list[torch.Tensor], chunk: slice, kept: torch.Tensor) -> torch.Tensor:
        (bucket,) = logits
        column, here = self._columns(chunk, bucket.shape[1])
        self._leave_out(bucket, column, here)
        bucket.sub_(kept[:, -1:]).exp_().mul_(kept[:, -2:-1])
        return bucket.scatter_add_(1, column, torch.where(here, kept[:, :-2], 0.0))

    def _columns(self, chunk: slice, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where this rank has the ids: [n, k] columns, 0 for those it has not, and whether it has them."""
        ids = self.ids[chunk]
        column = ids - first_column(self.tp_group, columns)
        here = (ids >= 0) & (column >= 0) & (column < columns)
        return torch.where(here, column, 0), here

    def _leave_out(self, logits: torch.Tensor, column: torch.Tensor, here: torch.Tensor) -> None:
        """-inf at the ids; by a minimum, so that what is not here changes nothing."""
        smallest = torch.where(here, -torch.inf, torch.inf).to(logits.dtype)
        logits.scatter_reduce_(1, column, smallest, "amin")
