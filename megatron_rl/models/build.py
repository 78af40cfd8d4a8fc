"""Builds a Megatron model from a Hugging Face folder and exports its weights: `load` returns a `Model` that does both."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from megatron.bridge.models.conversion.model_bridge import WeightConversionTask, _megatron_local_name_to_global
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
from megatron.core import parallel_state, tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import layers
from transformers import PreTrainedConfig

from megatron_rl.config import LoRAConfig, ParallelConfig, PrecisionConfig
from megatron_rl.config.plan import expert_tensor_size
from megatron_rl.errors import UserError, together
from megatron_rl.models import peft_folder
from megatron_rl.models.adapters import WRAPPED, Adapter, adapters, add_adapters, merged_tasks
from megatron_rl.models.bridges import IncompleteWeights, OurSpec, Weights, make_bridge
from megatron_rl.models.families import CLASSIFIER, architecture, expert_count, family_of, is_classifier
from megatron_rl.models.freeze import ADAPTER, EMBEDDING, SINKS, check_patterns, is_frozen, plain_name
from megatron_rl.models.hf_folder import SHARD_BYTES, check_weight_files, copy_metadata, whole_folder, write_weights
from megatron_rl.models.identical_layers import set_batch_invariant
from megatron_rl.models.parallel_check import one_line, read_hf_config
from megatron_rl.models.precision import TRAIN, PrecisionRecipe, check_precision, this_machine
from megatron_rl.models.router import PREDICTOR_WEIGHT
from megatron_rl.models.spec import layer_spec
from megatron_rl.models.value_head import give_value_head
from megatron_rl.ops.flash import FlashImpl

NO_ADAPTERS = LoRAConfig()


@dataclass(frozen=True)
class Model:
    """Settings that build a folder's model under a parallel layout. Methods are collective unless they say otherwise."""

    path: Path
    hf_config: PreTrainedConfig
    config: GPTModelProvider
    """Megatron's TransformerConfig, which the chunks share."""
    bridge: OurSpec
    recipe: PrecisionRecipe
    freeze: tuple[str, ...] = ()
    """Patterns of parameters that are not trained (megatron_rl/models/freeze.py)."""
    value_head: bool = False
    """True if the head gives one number per token instead of logits."""
    lora: LoRAConfig = NO_ADAPTERS
    """Adapter settings; a rank of 0 means no adapters."""
    seed: int = 0
    """Seed for the initialization of adapters."""
    pooling: Literal["last", "mean"] = "last"
    """Rule that turns a reward model's numbers (one per token) into a response's score. transformers always uses the last
    number."""
    step_separator: str | None = None
    """Text that ends each step of a response, if a reward model scores the steps; None if it scores whole responses."""

    def make_chunks(
        self, load_weights: bool = True, weights: str | Path | None = None, *, adapt: bool = True
    ) -> list[GPTModel]:
        """Build this rank's model chunks, one per virtual pipeline stage, without DDP. parallel_state must be initialized.

        weights: another folder of the same architecture to load weights from. load_weights: False leaves the parameters as
        uninitialized memory. adapt: True to add the adapters of `lora`.
        """
        groups = ProcessGroupCollection.use_mpu_process_groups()
        self.config._pg_collection = groups
        virtual = self.config.virtual_pipeline_model_parallel_size
        first, last = parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage
        chunks = []
        for stage in range(virtual) if virtual else [None]:
            ends = {"vp_stage": stage} if virtual else {}
            chunk = self.config.provide(
                pre_process=first(ignore_virtual=not virtual, **ends),
                post_process=last(ignore_virtual=not virtual, **ends),
                vp_stage=stage,
            )
            if self.value_head:
                give_value_head(chunk)
            chunk.model_type = cast("Any", ModelType.encoder_or_decoder)  # Megatron has two enums of this name
            if virtual:
                chunk.vp_stage = stage
            for parameter in chunk.parameters():
                tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
            chunks.append(chunk.cuda() if torch.cuda.is_available() else chunk)
        if load_weights:
            self.load_hf_weights(chunks, weights)
        if self.freeze:
            self._freeze(chunks)
        if self.lora.rank and adapt:
            self._add_adapters(chunks)
        if self.recipe.block is not None and not self.config.fp8:  # FP8 is simulated
            from megatron_rl.models.experts import FakeQuantizer

            quantizer = FakeQuantizer(self.recipe.block)
            for chunk in chunks:
                quantizer.attach(chunk)
        return chunks

    def parameter_names(self, chunks: list[GPTModel]) -> list[dict[str, torch.nn.Parameter]]:
        """Return this rank's parameters of each chunk, by their plain names (`models.freeze`) in the whole model."""
        return [
            {names[local]: parameter for local, parameter in chunk.named_parameters()}
            for chunk, names in zip(chunks, self._names(chunks), strict=True)
        ]

    def _names(self, chunks: list[GPTModel]) -> list[dict[str, str]]:
        """Return a dict {local name: plain name} per chunk. An adapter does not change the plain name of its layer's weight."""
        tied = self.config.share_embeddings_and_output_weights

        def name_of(local: str, stage: int) -> str:
            layer, of_adapter, rest = local.partition(ADAPTER)
            # Megatron-Bridge only numbers an expert's own weights.
            asked = f"{layer}.weight" if of_adapter else local
            whole = plain_name(_megatron_local_name_to_global([*chunks], self.config, asked, stage), tied=tied)
            whole = whole.replace(WRAPPED, ".")
            return whole.removesuffix(".weight") + of_adapter + rest if of_adapter else whole

        return [
            {local: name_of(local, stage) for local, _ in chunk.named_parameters()}
            for stage, chunk in enumerate(chunks)
        ]

    def adapters(self, chunks: list[GPTModel]) -> list[Adapter]:
        """Return this rank's adapters."""
        if not self.lora.rank:
            return []
        names = self._names(chunks)
        return [found for chunk, of_chunk in zip(chunks, names, strict=True) for found in adapters(chunk, of_chunk)]

    def _add_adapters(self, chunks: list[GPTModel]) -> None:
        for chunk, names in zip(chunks, self._names(chunks), strict=True):
            add_adapters(self.lora, chunk, names, seed=self.seed)
            if self.value_head and chunk.post_process:
                chunk.output_layer.requires_grad_(True)
            self._begin_graph(chunk, {*names.values()})
        if self.lora.path:
            self._load_adapters(chunks, Path(self.lora.path))

    def _load_adapters(self, chunks: list[GPTModel], path: Path) -> None:
        """Load adapters from a folder. Collective. Errors: UserError if the model has no adapter for a layer of the folder."""
        folder = peft_folder.read_folder(path)
        filled: list[str] = []

        def fill() -> None:
            filled.extend(peft_folder.fill(self.adapters(chunks), folder, self.bridge.mapping_registry(), self.config))

        together(fill)
        taken = filled
        if folder.score is not None and self.value_head and chunks[-1].post_process:
            chunks[-1].output_layer.get_parameter("weight").data.copy_(folder.score)
        everyones: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyones, taken)
        if left := sorted(folder.layers.keys() - {layer for layers in everyones for layer in layers}):
            raise UserError(
                f"config: lora.path = {path}: has an adapter for {left[0]}, but lora.targets does not; add its layer there"
            )

    def _begin_graph(self, chunk: GPTModel, names: Set[str]) -> None:
        """Make a frozen embedding's output require gradients, because recomputed layers need inputs with gradients."""
        if self.config.recompute_granularity and EMBEDDING in names and chunk.pre_process:
            chunk.embedding.register_forward_hook(_with_gradient)

    def _freeze(self, chunks: list[GPTModel]) -> None:
        named = self.parameter_names(chunks)
        everyones: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyones, [name for names in named for name in names])
        check_patterns(self.freeze, {name for names in everyones for name in names})
        for chunk, names in zip(chunks, named, strict=True):
            for name, parameter in names.items():
                if is_frozen(name, self.freeze):
                    parameter.requires_grad_(False)
            self._begin_graph(chunk, names.keys())

    def load_hf_weights(self, chunks: list[GPTModel], path: str | Path | None = None) -> None:
        """Read the folder's safetensors into the chunks. Errors: UserError that names the file or tensor, on all ranks."""
        for _ in self.iter_load(chunks, path):
            pass

    def iter_load(self, chunks: list[GPTModel], path: str | Path | None = None) -> Iterator[str]:
        """Load as in load_hf_weights, and yield each Megatron parameter's name when it is loaded."""
        folder = self.path if path is None else Path(path)
        if path is not None and architecture(read_hf_config(folder)) != architecture(self.hf_config):
            raise UserError(f"model folder {folder}: does not have the architecture of {self.path}")
        with _naming(folder):
            yield from self.bridge.load_into(chunks, self._files(folder))

    def reader(
        self, chunks: list[GPTModel]
    ) -> tuple[list[WeightConversionTask], Callable[[WeightConversionTask], torch.Tensor | None]]:
        """Return the tasks that produce the parameters from the folder's tensors, and a function that runs one task.

        This method is for callers without enough memory for all parameters. Errors: UserError as in load_hf_weights, also from
        the returned function.
        """
        files = self._files(self.path)
        with _naming(self.path):
            tasks, weights = self.bridge.complete_tasks(chunks, files), Weights(self.bridge, files)

        def weight_of(task: WeightConversionTask) -> torch.Tensor | None:
            with _naming(self.path):
                return weights(task)

        return tasks, weight_of

    def _files(self, folder: Path) -> PreTrainedCausalLM:
        check_weight_files(folder)
        source = PreTrainedCausalLM.from_pretrained(folder, trust_remote_code=False)
        source.config = cast("Any", self.hf_config)  # declared as AutoConfig, but no config is one
        return source

    def export_plan(self, chunks: list[GPTModel], *, foreign: bool = False) -> list[WeightConversionTask]:
        """Return the tasks that produce the Hugging Face tensors from parameters. All exports of these chunks can share them.

        foreign: include route predictors, which are not a part of the architecture, for an engine that has predictors.
        """
        tasks = cast("list[WeightConversionTask]", self.bridge.build_conversion_tasks(self.hf_config, chunks))
        return [task for task in tasks if foreign or not task.global_param_name.endswith(PREDICTOR_WEIGHT)]

    def merged(self, chunks: list[GPTModel], plan: Iterable[WeightConversionTask]) -> Iterator[WeightConversionTask]:
        """Yield the plan's tasks one by one, with adapters merged into the weights. Collective."""
        return merged_tasks(plan, self.adapters(chunks))

    @torch.no_grad()
    def export_hf_weights(
        self, chunks: list[GPTModel], plan: Iterable[WeightConversionTask] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, full tensor) one at a time, in the dtypes of the trained weights, on every rank.

        A tensor may share memory with a parameter: use or copy the tensor before the next optimizer step.
        plan: result of `export_plan`, which the caller may keep for several exports or give other weights; None: a new plan.
        """
        vocab = self.hf_config.vocab_size
        exported = self.bridge.stream_weights_megatron_to_hf(
            chunks,
            SimpleNamespace(config=self.hf_config),  # no files: the model's own dtypes are exported
            cpu=False,
            show_progress=False,
            conversion_tasks=cast("Any", self.merged(chunks, plan or self.export_plan(chunks))),
            merge_adapter_weights=False,
        )
        for name, tensor in exported:
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                tensor = tensor[:vocab]  # drop the rows that pad the vocabulary for tensor parallelism
            yield name, tensor

    def save_hf_metadata(self, out_dir: str | Path) -> None:
        """Write config.json (for the trained dtype), generation config and tokenizer files. Not collective."""
        copy_metadata(
            self.path, Path(out_dir), self.config.params_dtype, self._classifier() if self.value_head else None
        )

    def _classifier(self) -> dict[str, Any]:
        name = architecture(self.hf_config).replace("ForCausalLM", CLASSIFIER)
        pad, ends = (getattr(self.hf_config, f"{which}_token_id", None) for which in ("pad", "eos"))
        if pad is not None and pad in (ends if isinstance(ends, list) else [ends]) and self.pooling == "last":
            logging.getLogger(__name__).warning(
                f"{self.path}: pad_token_id is an end-of-sequence token, so transformers' classifiers skip it and read the"
                " score before it. This model's score is after it; SGLang and megatron_rl read it there"
            )
        label = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}  # transformers counts the labels
        learned = {"reward_pooling": self.pooling, "reward_step_separator": self.step_separator}
        return {"architectures": [name], "tie_word_embeddings": False, **learned, **label}

    def gather_adapters(self, chunks: list[GPTModel]) -> dict[str, torch.Tensor]:
        """Return all adapters in PEFT's format, and the value head if there is one, on rank 0. Collective."""
        found = peft_folder.gather(self.adapters(chunks))
        tensors = peft_folder.to_peft(found, self.bridge.mapping_registry(), self.config)
        if self.value_head:
            heads: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
            last = chunks[-1]
            head = last.output_layer.get_parameter("weight").detach().cpu().clone() if last.post_process else None
            dist.gather_object(head, heads)
            tensors |= {peft_folder.HEAD: next(head for head in heads if head is not None)} if heads else {}
        return tensors

    def write_adapters(self, tensors: dict[str, torch.Tensor], out: Path) -> None:
        """Write the result of gather_adapters as a folder. Not collective. Errors: OSError."""
        peft_folder.write_folder(out, tensors, self.lora, self.path)

    def save_hf(
        self,
        chunks: list[GPTModel],
        out_dir: str | Path,
        wrap: Callable[[Iterator[tuple[str, torch.Tensor]]], Iterator[tuple[str, torch.Tensor]]] = iter,
        complete: Callable[[Path], None] = lambda folder: None,
        *,
        plan: Iterable[WeightConversionTask] | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Write a Hugging Face folder on rank 0. The folder gets its final name only when it is complete.

        wrap: wraps the stream of tensors, for example for a progress line. complete: called with the folder after all files are
        written. plan: as in export_hf_weights. shard_bytes: largest file size in bytes; a file is held in memory until full.
        Errors: UserError on all ranks if the disk is full or the folder cannot be written.
        """
        out = Path(out_dir)
        tensors = wrap(self.export_hf_weights(chunks, plan))

        def save() -> None:
            try:
                if dist.get_rank() > 0:
                    return
                with whole_folder(out, replace=True) as partial:
                    self.save_hf_metadata(partial)
                    write_weights(partial, tensors, shard_bytes)
                    complete(partial)
            finally:
                for _ in tensors:  # for the other ranks, and for the rest on rank 0 after an error
                    pass

        together(save)


def load(
    hf_path: str | Path,
    *,
    parallel: ParallelConfig,
    precision: str,
    recompute: Literal["none", "selective", "full"] = "none",
    moe_dispatcher: Literal["alltoall", "allgather", "flex"] = "alltoall",
    moe_router_fusion: bool = False,
    moe_permute_fusion: bool = True,
    moe_aux_loss: float = 0.0,
    moe_z_loss: float = 0.0,
    freeze: Sequence[str] = (),
    lora: LoRAConfig | None = None,
    seed: int = 0,
    attention_sinks: Literal["exact", "ignored"] = "exact",
    flash_attention: FlashImpl = "torch",
    value_head: bool = False,
    pooling: Literal["last", "mean"] = "last",
    plain: bool = False,
    identical: bool = False,
) -> Model:
    """Read a folder's config.json and return a `Model` with the settings for Megatron. This function builds no layers yet.

    precision: a recipe in `precision.TRAIN` that this machine can run or simulate. moe_permute_fusion: use Transformer Engine's
    kernels, if installed, to send tokens to their experts and back; turn it off if the caller must find each token's rows.
    freeze: patterns of parameters that are not trained. lora: adapters, initialized with `seed`. attention_sinks,
    flash_attention: as in ModelConfig. value_head: compute one number per token instead of logits, with the folder's own head
    (a classifier's) or, for a language model, with a new head that starts at zero. pooling: as in RewardModelConfig.

    plain: use layers without Transformer Engine, so that their inputs can be observed. fp32 always uses these layers. They
    simulate FP8; recipes without a simulation (fp8_delayed, mxfp8) run in bf16. identical: use batch-invariant layers, like
    the engine.

    Errors: UserError for a folder, an architecture or a precision that cannot be used.
    """
    asked = PrecisionConfig(train=cast("Any", precision))  # which validates it
    check_precision(asked, this_machine(), rolls_out=False)
    hf_config = read_hf_config(hf_path)
    method = (getattr(hf_config, "quantization_config", None) or {}).get("quant_method")
    if method in ("modelopt", "compressed-tensors"):
        raise UserError(
            f"model folder {hf_path}: is quantized ({method}), for serving; use the unquantized weights that it was made from"
            " for training and conversion"
        )
    if is_classifier(hf_config) and not value_head:
        raise UserError(
            f"model folder {hf_path}: has a head with one number, like a reward model or critic, and no head over the"
            " vocabulary; give the folder of a language model"
        )
    plain = plain or TRAIN[precision].dtype == torch.float32  # Transformer Engine multiplies fp32 as TF32
    bridge = make_bridge(hf_config, value_head=value_head)
    config = bridge.provider_bridge(SimpleNamespace(config=hf_config))
    _set_parallel(config, parallel)
    _set_kernels(config, TRAIN[precision], recompute, plain)
    if expert_count(hf_config):
        _set_experts(config, moe_dispatcher, moe_aux_loss, moe_z_loss, moe_router_fusion, moe_permute_fusion)
    spec_options: dict[str, Any] = {"plain": plain, "flash_attention": flash_attention}
    spec_options["norms_over_all_heads"] = family_of(hf_config).qk_norm == "heads"
    if identical:
        spec_options["rotary"] = set_batch_invariant(config, hf_config)
    if attention_sinks == "ignored":  # sinks get no gradient, and DDP would wait for them
        spec_options["ignore_sinks"] = True
        freeze = [*freeze, SINKS]
    config.transformer_layer_spec = partial(layer_spec, **spec_options)
    if value_head:
        config.share_embeddings_and_output_weights = False
    config.should_pad_vocab = hf_config.vocab_size % parallel.tensor > 0
    config.make_vocab_size_divisible_by = 1  # times the tensor-parallel size
    config.calculate_per_token_loss = True
    config.perform_initialization = False  # weights are loaded
    config.hidden_dropout = config.attention_dropout = 0.0
    try:
        config.finalize()
    except (ValueError, AssertionError) as error:
        raise UserError(f"model folder {hf_path}: Megatron refuses these settings: {one_line(error)}") from None
    # Set after finalize, which refuses it with the allgather dispatcher. Packed micro-batches differ in length.
    config.variable_seq_lengths = parallel.pipeline > 1
    return Model(
        Path(hf_path),
        hf_config,
        config,
        bridge,
        replace(TRAIN[precision], fp8_recipe="") if plain else TRAIN[precision],
        tuple(freeze),
        value_head,
        lora or NO_ADAPTERS,
        seed,
        pooling,
        getattr(hf_config, "reward_step_separator", None),
    )


@contextlib.contextmanager
def _naming(folder: Path) -> Iterator[None]:
    try:
        yield
    except IncompleteWeights as error:
        raise UserError(f"model folder {folder}: {error}") from None


def _with_gradient(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    return output if output.requires_grad or not torch.is_grad_enabled() else output.requires_grad_()


def _set_parallel(config: GPTModelProvider, parallel: ParallelConfig) -> None:
    config.tensor_model_parallel_size = parallel.tensor
    config.sequence_parallel = parallel.tensor > 1
    config.pipeline_model_parallel_size = parallel.pipeline
    config.virtual_pipeline_model_parallel_size = parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
    config.context_parallel_size = parallel.context
    config.cp_comm_type = parallel.cp_comm_type
    config.expert_model_parallel_size = parallel.expert
    config.expert_tensor_parallel_size = expert_tensor_size(parallel)
    if parallel.virtual_pipeline > 1:  # with gloo, batched p2p mixes up the interleaved schedule's messages
        config.overlap_p2p_comm, config.batch_p2p_comm = True, False


def _set_kernels(
    config: GPTModelProvider, recipe: PrecisionRecipe, recompute: Literal["none", "selective", "full"], plain: bool
) -> None:
    gpu = torch.cuda.is_available()
    config.params_dtype = config.pipeline_dtype = config.autocast_dtype = recipe.dtype
    config.bf16, config.fp16 = recipe.dtype == torch.bfloat16, False
    fast = gpu and not plain
    if recipe.fp8_recipe and fast and not HAVE_TE:
        raise UserError(
            "config: precision.train: Transformer Engine is installed but cannot be imported; see the error of"
            " python -c 'import transformer_engine.pytorch'"
        )
    if recipe.fp8_recipe and fast:  # parameters stay bf16; only the products are FP8
        config.fp8, config.fp8_recipe = recipe.fp8, cast("Any", recipe.fp8_recipe)
    config.attention_softmax_in_fp32 = True
    config.transformer_impl = "transformer_engine" if HAVE_TE and gpu and not plain else "local"
    config.use_cpu_initialization = not gpu
    # Transformer Engine's layers need nothing else for this, but Megatron's own output layer needs Apex's kernel.
    config.gradient_accumulation_fusion = gpu and layers._grad_accum_fusion_available
    config.bias_activation_fusion = config.bias_dropout_fusion = gpu
    config.masked_softmax_fusion = config.persist_layer_norm = config.apply_rope_fusion = False
    config.cross_entropy_loss_fusion = False  # our own head computes log-probs
    config.recompute_granularity = None if recompute == "none" else recompute
    if recompute == "full":
        config.recompute_method, config.recompute_num_layers = "uniform", 1


def _set_experts(
    config: GPTModelProvider,
    dispatcher: Literal["alltoall", "allgather", "flex"],
    aux_loss: float,
    z_loss: float,
    router_fusion: bool,
    permute_fusion: bool,
) -> None:
    config.moe_token_dispatcher_type = dispatcher
    if dispatcher == "flex":
        config.moe_flex_dispatcher_backend = "deepep"
    config.moe_router_load_balancing_type = "aux_loss" if aux_loss > 0 else "none"
    config.moe_aux_loss_coeff = aux_loss
    config.moe_z_loss_coeff = z_loss or None
    config.moe_router_dtype = "fp32"
    config.moe_router_fusion = router_fusion
    config.moe_shared_expert_overlap = False
    # All experts of a rank run in one kernel. In FP8, this kernel pads each expert's tokens itself. So the router's own padding
    # (moe_router_padding_for_quantization), which would add tokens to routes, stays off.
    config.moe_grouped_gemm = config.transformer_impl == "transformer_engine"
    config.moe_permute_fusion = config.moe_grouped_gemm and permute_fusion
    if config.add_bias_linear:  # gpt-oss: grouped experts refuse it
        config.bias_dropout_fusion = False
