"""Distillation from a teacher's hidden states: KL divergences between two heads, computed chunk by chunk over tokens.

z are the student's logits divided by the temperature. s and t are the log-softmaxes of student and teacher, m is the log of
their mixture, and E is the mean under the student:

    forward:  KL(teacher || student) = sum e^t (t - s);           d/dz = e^s - e^t

    reverse:  KL(student || teacher) = E[s - t];                  d/dz = e^s ((s - t) - E[s - t])

    jensen_shannon:  mix sum e^t (t - m) + (1 - mix) E[s - m];    d/dz = (1 - mix) e^s ((s - m) - E[s - m])

Forward is the loss of Hinton et al. (arXiv 1503.02531) without the factor of the squared temperature. Reverse is the loss of
MiniLLM (arXiv 2306.08543). jensen_shannon is eq. 1 of GKD (Agarwal et al., arXiv 2306.13649), as in TRL's generalized_jsd_loss.
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
"""Logit of padding columns, with probability 0. It is finite because -inf minus -inf would be NaN."""


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
    """Return the divergence of each token in nats, [T] fp32 (fp64 if an argument is fp64).

    The result is differentiable in `hidden` and `weight` only.

    hidden [T, d], weight [V / tp, d]; teacher_hidden [T, dt], teacher_weight [V / tp, dt]: fp32, bf16 or fp64. The teacher
    may have another width and dtype. The logits of both are divided by `temperature`. Unlike Hinton et al. and ModelOpt's
    LogitsDistillationLoss, this function does not multiply the result by the squared temperature.

    direction: forward is KL(teacher || student), reverse is KL(student || teacher). jensen_shannon is
    mix KL(teacher || m) + (1 - mix) KL(student || m) with m = mix teacher + (1 - mix) student and 0 < mix < 1. mix is the
    weight of the teacher in both places (TRL's beta). For mix near 0 the result is about mix x forward, for mix near 1 about
    (1 - mix) x reverse. (TRL returns forward and reverse themselves at 0 and 1.)

    The logits of student and teacher exist for at most `chunk_tokens` tokens at a time, in the forward and in the backward
    pass. With several chunks the backward pass computes the logits again. This takes six matrix multiplications of the head's
    size in total; one chunk takes four. The gradient of `weight` is summed over chunks in fp32.

    With tp_group each rank holds an equal share of the rows of both weights. The gradient of `hidden` is then only this
    rank's part; the caller sums the parts, as with Megatron's column-parallel layers. vocab_size: vocabulary of the model;
    columns beyond it (Megatron's padding) are left out of the softmax. fp32_logits: as in linear_log_probs, for each bf16
    head.

    A token with NaN or infinite logits gives NaN. Errors: ValueError that names the argument.
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
    """Return the divergence [T] by its definition, in plain differentiable torch over whole logits [T, V]."""
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
    """TokenTerms of `linear_kl`, which keep three numbers per token.

    These are the logs of both softmax denominators, and the mean E[...] in the formula of the gradient (module docstring).
    """

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
        """Return m - s (m: log of the mixture), computed from `difference` = t - s without the rounding error of s.

        The result is about zero if t and s are equal.
        """
        own = difference.new_tensor(math.log1p(-self.mix))
        above = difference + math.log(self.mix)
        return torch.logaddexp(above, own, out=above)


# -- linear topk kl ------------------------------------------------------------------------------------------------------
# Distillation from recorded log-probs of a teacher's likeliest tokens: KL over these tokens and one bucket for all others.
# Let a be the teacher's probabilities of the k + 1 classes, b the student's, z the student's logits, and q the student's
# softmax over only the tokens of the bucket:
#     forward  KL(a || b) = sum a log(a / b)        c = b - a
#     reverse  KL(b || a) = sum b log(b / a)        c = b (log(b / a) - KL)
# dKL/dz is c of the class for a token that has its own class, and c of the bucket times q for a token in the bucket.


TopkDirection = Literal["forward", "reverse"]
_TOPK_OP = "linear_topk_kl"
_NONE = (-100, -1)
_MOST = 1e-3
"""Largest amount by which the sum of a teacher's recorded probabilities may exceed one. Rounding of a softmax of bf16 logits
stays below it.
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
    """Return the KL of each token between k + 1 classes, in nats, [T] fp32 (fp64 if hidden is fp64).

    The result is differentiable in `hidden` and `weight`.

    token_ids [T, k] int64: ids of the whole vocabulary, in any order, each at most once per row. -100 or -1 marks an empty
    slot, whose log-prob is ignored. An id with the log-prob -inf is treated as empty too. log_probs [T, k] fp32 or fp64: the
    teacher's log-probs over its whole vocabulary at temperature 1; this function therefore has no temperature. All other
    tokens form one class, the bucket. Its probability is 1 minus the sum of the listed probabilities.

    direction: forward is KL(teacher || student), reverse is KL(student || teacher). By the data-processing inequality the KL
    between classes is a lower bound of the KL between tokens (`linear_kl` at temperature 1). The two are equal if k is the
    vocabulary size, or if teacher and student distribute the bucket's probability in the same way. The KL between classes
    does not depend on how the student distributes the bucket's probability.

    log_probs are rounded, so the probability of the teacher's bucket can be zero or negative. In this case the forward KL
    leaves the bucket out. The reverse KL would be infinite, so it uses a probability of 8 rounding units of log_probs (1e-6 in
    fp32) for the bucket.

    hidden [T, d], weight [V / tp, d], tp_group, vocab_size, chunk_tokens, fp32_logits, gradients: as in linear_kl.

    Errors: ValueError that names the argument, or the row whose ids are outside of the vocabulary or repeated, or whose
    probabilities sum to more than one. The host waits for a GPU once.
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
    """Return ids [T, k] (-1: empty) and the teacher's log-probs of the classes, [T, k + 1] fp64, bucket last (-inf: empty)."""
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
    """TokenTerms of `linear_topk_kl`, which keep per token the gradient of each class and the bucket's log-sum-exp."""

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
        # There are few classes, so fp64 is cheap.
        student, teacher = logs.double().log_softmax(1), self.classes[chunk]
        # If the student has no token in a class (an empty bucket), the teacher's probability of it is only rounding error.
        teacher = torch.where(student == -torch.inf, -torch.inf, teacher)
        ratio = torch.where(teacher == -torch.inf, 0.0, teacher - student)
        if self.direction == "forward":
            value = (teacher.exp() * ratio).sum(1)
            slope = student.exp() - teacher.exp()
        else:  # the teacher has every class that the student has
            value = -(student.exp() * ratio).sum(1)
            slope = -student.exp() * (ratio + value[:, None])
        log_sum = torch.where(logs[:, -1:] == -torch.inf, 0.0, logs[:, -1:])  # empty bucket
        return value.to(bucket.dtype), torch.cat([slope.to(bucket.dtype), log_sum], 1)

    def gradient(self, logits: list[torch.Tensor], chunk: slice, kept: torch.Tensor) -> torch.Tensor:
        (bucket,) = logits
        column, here = self._columns(chunk, bucket.shape[1])
        self._leave_out(bucket, column, here)
        bucket.sub_(kept[:, -1:]).exp_().mul_(kept[:, -2:-1])
        return bucket.scatter_add_(1, column, torch.where(here, kept[:, :-2], 0.0))

    def _columns(self, chunk: slice, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the columns [n, k] of the ids on this rank (0 if on another rank), and a mask of ids on this rank."""
        ids = self.ids[chunk]
        column = ids - first_column(self.tp_group, columns)
        here = (ids >= 0) & (column >= 0) & (column < columns)
        return torch.where(here, column, 0), here

    def _leave_out(self, logits: torch.Tensor, column: torch.Tensor, here: torch.Tensor) -> None:
        """Set the logits at the ids to -inf. A minimum is used, so that ids of other ranks change nothing."""
        smallest = torch.where(here, -torch.inf, torch.inf).to(logits.dtype)
        logits.scatter_reduce_(1, column, smallest, "amin")
