"""Reader for torch.distributed.checkpoint folders that may come from somebody else: no code in the files is run.

The file `.metadata` is a pickle, and so is each object that is saved with the tensors. If torch loads a pickle, the pickle can
run any code. This reader accepts in `.metadata` only the classes that metadata consists of, and reads objects like torch.load
with weights_only.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint._nested_dict import set_element  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron_rl.models.parallel_check import one_line

_CLASSES = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    *(
        ("torch.distributed.checkpoint.planner", name)
        for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
    ),
}
"""(module, name) of each class and function that torch's and Megatron's writers use in `.metadata`. torch's dtypes are also
accepted, but not listed here."""


class CheckpointReader(FileSystemReader):
    """torch's reader of a checkpoint folder, for checkpoints that are not trusted.

    Errors: CheckpointingException that names the file, if a pickle holds anything but metadata or plain data, or if the
    metadata names files outside of the folder.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        # Read here, because torch logs errors of `read_metadata` with a traceback and then tries per-rank metadata.
        self._metadata = _read_metadata(Path(folder) / ".metadata")
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata: the checkpoint's contents and their positions in the files."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of the plan. Errors: see the class; OSError."""
        assert isinstance(planner, DefaultLoadPlanner)  # Megatron's planner is a subclass
        planner.load_bytes = functools.partial(self._load_object, planner)  # torch's own would run the pickle
        return super().read_data(plan, planner)

    def _load_object(self, planner: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            found = torch.load(value, map_location="cpu", weights_only=True)
        except Exception as error:  # pickles can raise any type of error
            file = self.storage_data[read_item.storage_index].relative_path
            raise CheckpointingException(
                f"{file} cannot be read: {read_item.storage_index.fqn}: {_why(error)}"
            ) from None
        if planner.flatten_state_dict:
            set_element(planner.original_state_dict, planner.mappings[read_item.dest_index.fqn], found)
        else:
            planner.state_dict[read_item.dest_index.fqn] = found


@contextlib.contextmanager
def untrusted() -> Iterator[None]:
    """Patch Megatron's dist_checkpointing, which has no argument for a reader, to use `CheckpointReader` inside the block.

    Errors: CheckpointingException that names the file, instead of torch's errors with tracebacks.
    """

    def reader(folder: str | Path, *_: Any, **__: Any) -> CheckpointReader:
        return CheckpointReader(folder)

    with (
        mock.patch.object(strategies, "_get_filesystem_reader", reader),
        mock.patch.object(serialization, "_get_filesystem_reader", reader),
    ):
        try:
            yield
        except CheckpointException as error:  # by rank; each rank reads on its own
            raise CheckpointingException(one_line(next(iter(error.failures.values()))[0])) from None
        except pickle.UnpicklingError as error:
            raise CheckpointingException(f"{COMMON_STATE_FNAME} cannot be read: {_why(error)}") from None
        except (AttributeError, TypeError, RecursionError) as error:  # Megatron does not validate their JSON
            raise CheckpointingException(f"metadata.json or integrity.json cannot be read: {one_line(error)}") from None


def _why(error: Exception) -> str:
    """Return the error's reason without torch's advice on loading the file anyway."""
    return one_line(str(error).rpartition("WeightsUnpickler error: ")[2].partition("\n")[0])


def _read_metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"holds {type(metadata).__name__}, not metadata")
        for info in metadata.storage_data.values():
            if not isinstance(info, _StorageInfo) or Path(info.relative_path).name != info.relative_path:
                raise pickle.UnpicklingError("names a file outside of the checkpoint")
    except OSError:
        raise
    except Exception as error:  # a broken pickle can raise any type of error
        raise CheckpointingException(f"{path.name} cannot be read: {one_line(error)}") from None
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"names {module}.{name}, which does not belong into a checkpoint's metadata and may run code of its writer"
        )
