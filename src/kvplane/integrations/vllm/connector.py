"""vLLM's KV connector (v1): its calls, handed to the scheduler's side and the worker's side."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import vllm
from kvplane.errors import ArgumentError
from kvplane.integrations.vllm.copying import PagedLayer, PageLayout
from kvplane.integrations.vllm.identity import fingerprint_of, weights_identity
from kvplane.integrations.vllm.jobs import LoadJob, StoreJob
from kvplane.integrations.vllm.options import ConnectorOptions
from kvplane.integrations.vllm.planning import PagedGroup, gathered_heads
from kvplane.integrations.vllm.scheduling import SchedulerSide
from kvplane.integrations.vllm.working import Workers, WorkerSide

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class Orders(KVConnectorMetadata):  # type: ignore[misc] # vLLM's, not known here
    """A step's loads and stores.

    Args:
        loads: to begin.
        stores: to take when the step has ended.
    """

    def __init__(self, loads: list[LoadJob], stores: list[StoreJob]) -> None:
        self.loads = loads
        self.stores = stores


class KVPlaneConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc] # likewise
    """Prefixes in a root of packs, shared by every engine of the same model.

    Raises:
        ArgumentError: a configuration, or an engine, that it does not serve.
        GeometryError: a model that no store holds.
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:  # noqa: ANN401
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        options = ConnectorOptions.of(transfer.kv_connector_extra_config)
        _check(vllm_config)
        # a load that fails is computed, whatever the engine's default
        transfer.kv_load_failure_policy = "recompute"
        model = vllm_config.model_config
        self._geometry, fingerprint = fingerprint_of(
            _own_config(model),
            dtype=str(model.dtype).removeprefix("torch."),
            weights=weights_identity(model.model, given=options.weights, revision=model.revision),
            quantisation=model.quantization,
        )
        paged = _paged(kv_cache_config, self._geometry)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(options, fingerprint, paged)
        else:
            self._workers = _workers(vllm_config, self._geometry)
            self._worker = WorkerSide(
                options,
                fingerprint.hex,
                self._geometry.groups,
                paged,
                _numerics(vllm_config),
                self._workers,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """Nothing is owed to anybody: a store that was dropped is a later miss."""
        return False

    # the worker's side

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Find each layer's paged memory, and where its kernel puts rows."""
        layouts: dict[tuple[Any, ...], PageLayout | None] = {}
        layers = {}
        num_blocks = self._kv_cache_config.num_blocks
        for name, cache in kv_caches.items():
            layer = _layer_of(name)
            facts = self._geometry.layers[layer]
            dims = (facts.head_dim, facts.value_head_dim)
            if cache.dim() != 4 or cache.shape[3] != sum(dims):  # noqa: PLR2004 - B, H, N, C
                expected = f"[blocks, kv_heads, slots, {sum(dims)}]"
                raise ArgumentError(argument=name, expected=expected, got=tuple(cache.shape))
            what = (cache.device.type, cache.shape[2], *dims, cache.dtype)
            if what not in layouts:
                layouts[what] = _layout(cache, *dims, self._static_layer(name))
            split = cache.shape[0] // num_blocks
            layers[layer] = PagedLayer(cache, layouts[what], facts.head_dim, split=split)
        self._side().register(layers)

    def _static_layer(self, name: str) -> Any:  # noqa: ANN401 - vLLM's layer
        return self._vllm_config.compilation_config.static_forward_context[name]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        """Begin loads of requests that wait for them."""
        metadata = self._connector_metadata
        if isinstance(metadata, Orders):
            self._side().load(metadata.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no request is scheduled before its load has ended."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: Any,  # noqa: ANN401
        attn_metadata: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Nothing: all layers are taken together when the step has ended."""

    def wait_for_save(self) -> None:
        """Copy what the step's cuts need, before its blocks are anybody else's."""
        metadata = self._connector_metadata
        if isinstance(metadata, Orders):
            self._side().store(metadata.stores)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Loads that have ended; the failed ones among them."""
        return None, self.get_transfer_results(finished_req_ids).finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that have ended, and those that failed: the engine then computes."""
        side = self._side()
        side.ended(finished_req_ids)
        ended, failed = side.finished()
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def shutdown(self) -> None:
        """Write what waits to be written."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    # the scheduler's side

    def get_num_new_matched_tokens(
        self,
        request: Any,  # noqa: ANN401
        num_computed_tokens: int,
    ) -> tuple[int | None, bool]:
        """How many tokens beyond the engine's own a cut holds, loaded between steps."""
        ids = request.prompt_token_ids
        if (
            not ids
            or request.mm_features
            or request.lora_request
            or request.skip_reading_prefix_cache
        ):
            return 0, False
        found = self._plans().matched(
            request.request_id, ids, num_computed_tokens, salt=request.cache_salt
        )
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ANN401
        """Plan the load, or close what it left half filled to other requests."""
        tables = tuple(map(tuple, blocks.get_block_ids()))
        shut = self._plans().allocated(request.request_id, num_external_tokens, tables)
        self._shut(shut)

    def build_connector_meta(self, scheduler_output: Any) -> Orders:  # noqa: ANN401
        """The step's loads, and the cuts that it reaches."""
        plans = self._plans()
        self._shut(plans.shut_blocks(plans.requests))
        computed = {
            new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs
        }
        cached = scheduler_output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        stores = []
        for request, first in computed.items():
            stop = first + scheduler_output.num_scheduled_tokens[request]
            job = plans.store(request, first, stop, self._tables(request))
            if job is not None:
                stores.append(job)
        return Orders(plans.loads(), stores)

    def _tables(self, request: str) -> Callable[[], Any]:
        manager = self._kv_cache_manager
        if manager is None:
            raise ArgumentError(argument="vllm", expected="a cache manager", got="none")
        return lambda: manager.get_block_ids(request)

    def _shut(self, blocks: set[int]) -> None:
        if blocks and self._kv_cache_manager is not None:
            self._kv_cache_manager.evict_blocks(blocks)

    def update_connector_output(self, connector_output: Any) -> None:  # noqa: ANN401
        """Learn which loads failed."""
        self._plans().failed(set(connector_output.failed_recving or ()))

    def request_finished(
        self,
        request: Any,  # noqa: ANN401
        block_ids: list[int],
    ) -> tuple[bool, dict[str, Any] | None]:
        """As with several groups."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self,
        request: Any,  # noqa: ANN401
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Its blocks may be freed at once: what is stored was copied."""
        self._plans().ended(request.request_id)
        return False, None

    def _plans(self) -> SchedulerSide:
        if self._scheduler is None:
            raise ArgumentError(argument="role", expected="the scheduler's side", got=self._role)
        return self._scheduler

    def _side(self) -> WorkerSide:
        if self._worker is None:
            raise ArgumentError(argument="role", expected="a worker's side", got=self._role)
        return self._worker


def _check(config: Any) -> None:  # noqa: ANN401
    """Refuse engines whose rows would be stored or loaded wrongly."""
    parallel = config.parallel_config
    refused = {
        "pipeline_parallel_size": (1, parallel.pipeline_parallel_size),
        "decode_context_parallel_size": (1, parallel.decode_context_parallel_size),
        "speculative_config": (None, config.speculative_config),
    }
    for name, (expected, got) in refused.items():
        if got != expected:
            raise ArgumentError(argument=name, expected=str(expected), got=got)
    dtype = config.cache_config.cache_dtype
    if dtype not in ("auto", str(config.model_config.dtype).removeprefix("torch.")):
        raise ArgumentError(argument="kv_cache_dtype", expected="auto", got=dtype)


def _own_config(model: Any) -> Any:  # noqa: ANN401
    """The configuration as the model's folder says it: engines change theirs."""
    from transformers import AutoConfig  # noqa: PLC0415 - slow, and only here

    return AutoConfig.from_pretrained(
        model.model, revision=model.revision, trust_remote_code=model.trust_remote_code
    )


def _layer_of(name: str) -> int:
    found = _LAYER.search(name)
    if found is None:
        raise ArgumentError(argument="kv_cache", expected="a name with layers.<i>", got=name)
    return int(found[1])


def _paged(config: Any, geometry: Any) -> list[PagedGroup]:  # noqa: ANN401
    """The engine's groups, each of layers that the model has just so."""
    groups = []
    for group in config.kv_cache_groups:
        layers = tuple(sorted(map(_layer_of, group.layer_names)))
        window = getattr(group.kv_cache_spec, "sliding_window", None)
        kind = type(group.kv_cache_spec).__name__
        for layer in layers:
            facts = geometry.layers[layer] if layer < len(geometry.layers) else None
            known = kind in ("FullAttentionSpec", "SlidingWindowSpec", "SinkFullAttentionSpec")
            sliding = kind == "SlidingWindowSpec"
            held = window if sliding else None
            if facts is None or not known or not facts.owns_rows or facts.sliding_window != held:
                expected = "groups as the model's layers, from the hybrid cache manager"
                raise ArgumentError(argument=f"layer {layer}", expected=expected, got=kind)
        groups.append(
            PagedGroup(
                layers=layers,
                block_size=group.kv_cache_spec.block_size,
                sliding_window=window if kind == "SlidingWindowSpec" else None,
            )
        )
    held = {layer for group in groups for layer in group.layers}
    owned = {layer for layer, facts in enumerate(geometry.layers) if facts.owns_rows}
    if held != owned or any(not facts.has_attention for facts in geometry.layers):
        expected = f"rows of the layers {sorted(owned)}, and no other states"
        raise ArgumentError(argument="kv_cache_groups", expected=expected, got=sorted(held))
    return groups


def _numerics(config: Any) -> dict[str, Any]:  # noqa: ANN401
    return {
        "attention": "paged",
        "chunk": int(config.scheduler_config.max_num_batched_tokens),
        "device": config.device_config.device_type,
        "engine": "vllm",
        "tensor_parallel": int(config.parallel_config.tensor_parallel_size),
        "torch": torch.__version__,
        "vllm": vllm.__version__,
    }


def _workers(config: Any, geometry: Any) -> Workers:  # noqa: ANN401
    size = config.parallel_config.tensor_parallel_size
    if size == 1:
        return Workers()
    from vllm.distributed.parallel_state import get_tp_group  # noqa: PLC0415

    group = get_tp_group()

    def gather(rows: Tensor) -> Tensor | None:
        gathered: Tensor | None = group.gather(rows.contiguous(), dst=0, dim=1)
        if gathered is None:
            return None
        heads = next(
            each.num_kv_heads
            for each in geometry.groups
            if max(1, each.num_kv_heads // size) == rows.shape[1]
        )
        return gathered[:, gathered_heads(heads, size)]

    return Workers(group.rank_in_group, size, gather)


def _layout(cache: Tensor, head_dim: int, value_head_dim: int, layer: Any) -> PageLayout | None:  # noqa: ANN401
    """What the device's kernel makes of a page; None: key and value side by side."""
    if cache.device.type != "cpu":
        return None
    from vllm import _custom_ops as ops  # noqa: PLC0415

    def write(key: Tensor, value: Tensor, page: Tensor, slots: Tensor) -> None:
        keys, values = page.view(1, 1, 2 * page.shape[2], -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            key,
            value,
            keys,
            values,
            slots,
            layer.isa,
            k_scale=1.0,
            v_scale=1.0,
            kv_cache_dtype="auto",
        )

    return PageLayout.probed(write, cache.shape[2], head_dim, value_head_dim, cache.dtype)
