"""Every ONNX operator, each defined once as a plain function over numpy or JAX values.

`registry.py` says what a definition looks like, `context.py` what it may ask of its run; a file per family holds the
definitions. The layer knows graphs' values but no segments, actors or events.
"""

from __future__ import annotations

from transmuter_async.operators.channels_last import ChannelsLast, keep_channels_last
from transmuter_async.operators.context import Context, Subgraph, first_alarm
from transmuter_async.operators.contrib_decoders import Call
from transmuter_async.operators.contrib_generation import Outside, Search, conversation
from transmuter_async.operators.contrib_search import SEARCHES
from transmuter_async.operators.half import HALF, Half, uses_half, widen_half
from transmuter_async.operators.iteration import HOST_TRIPS
from transmuter_async.operators.lowering import LOWERINGS, lowerings_for
from transmuter_async.operators.recipes import GROWING, PREPARED_INPUTS, RECIPES
from transmuter_async.operators.registry import (
    Operator,
    forced_trace,
    invoke,
    is_host,
    known,
    operator,
    resolve,
    supported,
    xp,
)
from transmuter_async.operators.threefry import fold_in
from transmuter_async.operators.xla import DEFAULT_FUSIONS, FUSIONS, compile_program, module_size

# Importing a family fills the table.
from transmuter_async.operators import (  # isort: skip  # noqa: F401
    activation,
    attention,
    cast,
    comparison,
    contrib,
    contrib_attention,
    contrib_cache,
    contrib_experts,
    contrib_float_weights,
    contrib_packed_rows,
    contrib_packing,
    contrib_paged,
    contrib_quantized,
    contrib_quantized_elements,
    contrib_recurrent,
    contrib_search,
    contrib_small,
    contrib_state,
    contrib_tokens,
    contrib_weights,
    control,
    convolution,
    detection,
    elementwise,
    generator,
    image,
    indexing,
    layout,
    loss,
    matrix,
    ml,
    ml_linear,
    ml_trees,
    normalization,
    padding,
    pooling,
    quantization,
    random,
    recurrent,
    reduction,
    regions,
    resize,
    scatter,
    sequence,
    signal,
    text,
    training,
)

__all__ = [
    "DEFAULT_FUSIONS",
    "FUSIONS",
    "GROWING",
    "HALF",
    "HOST_TRIPS",
    "LOWERINGS",
    "PREPARED_INPUTS",
    "RECIPES",
    "SEARCHES",
    "Call",
    "ChannelsLast",
    "Context",
    "Half",
    "Operator",
    "Outside",
    "Search",
    "Subgraph",
    "compile_program",
    "conversation",
    "first_alarm",
    "fold_in",
    "forced_trace",
    "invoke",
    "is_host",
    "keep_channels_last",
    "known",
    "lowerings_for",
    "module_size",
    "operator",
    "resolve",
    "supported",
    "uses_half",
    "widen_half",
    "xp",
]
