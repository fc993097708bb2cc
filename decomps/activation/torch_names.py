"""The table of torch_internals.py: what of torch's is private, and what depends on it.

All were there on torch 2.11.0, 2.13.0, 2.14.1 and 2.15.0, unless a line says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

# What may be left out, as messages say it.
RULES = "all rules"
LEVELS = "the rules for autograd and vmap, in traces and in eager mode"
TRACES = "the rules for autograd and vmap in traces"
BATCHING = "the batching rules"
NODES = "derivatives by the table, and those that users declare"
FUNCTION_OPS = "operators of autograd.Functions"
ZEROS = "the rules for tangents that are zero"
FUNCTIONS = "the rules for autograd.Function in traces"
EAGER = "the rules of eager mode"
TABLE = "the decompositions for Inductor"
PASS = "passes over Inductor's graphs"
SYNC = "SyncBatchNorm"

WITH: dict[str, tuple[str, ...]] = {
    RULES: (
        LEVELS,
        TRACES,
        BATCHING,
        NODES,
        ZEROS,
        FUNCTIONS,
        FUNCTION_OPS,
        EAGER,
        SYNC,
        TABLE,
        PASS,
    ),
    LEVELS: (TRACES, BATCHING, NODES, ZEROS, FUNCTIONS, FUNCTION_OPS, EAGER),
    TRACES: (NODES, ZEROS),
    NODES: (FUNCTION_OPS,),
    FUNCTIONS: (FUNCTION_OPS,),
}


@dataclass(frozen=True)
class Internal:
    """path: where it is in torch. part: what cannot be without it. what: what it is, and for whom.

    optional: not in all versions; whoever asks does without.
    """

    path: str
    part: str
    what: str
    optional: bool = False


def _c(name: str, part: str, what: str) -> Internal:
    return Internal(f"torch._C.{name}", part, what)


def _functorch(name: str, part: str, what: str) -> Internal:
    return Internal(f"torch._C._functorch.{name}", part, what)


def _dynamo(name: str, what: str) -> Internal:
    return Internal(f"torch._dynamo.{name}", FUNCTIONS, what)


_CALL = "torch._functorch.autograd_function.custom_function_call"
_OP = "torch.ops.aten.mul.Tensor"  # any operator: what is asked for is what all of them have

INTERNALS = {
    # Operators and their schemas
    "OpOverload": Internal("torch._ops.OpOverload", RULES, "an operator: registry, table"),
    "OpOverloadPacket": Internal("torch._ops.OpOverloadPacket", RULES, "its overloads: registry"),
    "parse_schema": _c("parse_schema", RULES, "a schema from its text: registry"),
    "tree_leaves": Internal("torch.utils._pytree.tree_leaves", RULES, "of an argument: operators"),
    "tree_flatten": Internal("torch.utils._pytree.tree_flatten", NODES, "the same: table.nodes"),
    "tree_unflatten": Internal("torch.utils._pytree.tree_unflatten", NODES, "the same"),
    "tree_map": Internal("torch.utils._pytree.tree_map", FUNCTION_OPS, "the same: function_ops"),
    "suggest_memory_format": Internal(
        "torch._prims_common.suggest_memory_format",
        RULES,
        "the format that empty_like would keep, which has no public name in Python: conventions",
    ),
    "decomposition_table": Internal(
        "torch._decomp.decomposition_table", RULES, "torch's own decompositions: table.flat_graphs"
    ),
    "FakeTensor": Internal("torch._subclasses.FakeTensor", RULES, "in graphs: table.flat_graphs"),
    "FakeTensorMode": Internal("torch._subclasses.FakeTensorMode", RULES, "the same"),
    # Dispatch keys, and blocks that exclude some
    "DispatchKey": _c("DispatchKey", RULES, "the keys: everywhere here"),
    "DispatchKeySet": _c("DispatchKeySet", RULES, "sets of them: everywhere here"),
    "after_autograd_keyset": _c("_after_autograd_keyset", RULES, "below autograd: operators"),
    "AutoDispatchBelowAutograd": _c(
        "_AutoDispatchBelowAutograd", RULES, "a block that no tape and no tangent sees: buffers"
    ),
    "SetExcludeDispatchKeyGuard": _c(
        "_SetExcludeDispatchKeyGuard", RULES, "a block that allows a key again: operators, levels"
    ),
    "ExcludeDispatchKeyGuard": _c(
        "_ExcludeDispatchKeyGuard", LEVELS, "a block without some keys: kernels, zero_tensors"
    ),
    "ForceDispatchKeyGuard": _c(
        "_ForceDispatchKeyGuard", FUNCTION_OPS, "a block with other keys altogether: levels"
    ),
    "included_keys": _c(
        "_dispatch_tls_local_include_set", FUNCTION_OPS, "keys that are on: levels"
    ),
    "excluded_keys": _c(
        "_dispatch_tls_local_exclude_set", FUNCTION_OPS, "keys that are off: levels"
    ),
    "is_excluded": _c(
        "_dispatch_tls_is_dispatch_key_excluded", RULES, "whether such a block is on: operators"
    ),
    "len_torch_dispatch_stack": _c(
        "_len_torch_dispatch_stack", RULES, "how many modes see a call: operators"
    ),
    "TracingContext": Internal(
        "torch._guards.TracingContext", RULES, "what torch.compile traces: operators"
    ),
    "PYTHON_TLS_SNAPSHOT": _c("DispatchKey.PythonTLSSnapshot", RULES, "a key: levels"),
    "FUNCTORCH_BATCHED": _c("DispatchKey.FuncTorchBatched", BATCHING, "vmap's key: kernels"),
    "PYTHON": _c("DispatchKey.Python", ZEROS, "the key of modes: dispatch"),
    "ZERO_TENSOR": _c("DispatchKey.ZeroTensor", ZEROS, "zeros' key: dispatch, zero_tensors"),
    # Derivatives in progress. Forward mode's level changes: `forward_level` asks.
    "_current_level": Internal(
        "torch.autograd.forward_ad._current_level", RULES, "forward mode's: levels, operators"
    ),
    "is_functorch_wrapped_tensor": _functorch(
        "is_functorch_wrapped_tensor", RULES, "whether a level wraps a tensor: levels"
    ),
    "peek_interpreter_stack": _functorch(
        "peek_interpreter_stack", RULES, "the innermost level: levels"
    ),
    "get_interpreter_stack": _functorch("get_interpreter_stack", LEVELS, "all levels: levels"),
    "get_unwrapped": _functorch("get_unwrapped", LEVELS, "a tensor one level below: levels"),
    "GRAD": _functorch("TransformType.Grad", LEVELS, "a level's kind: levels"),
    "JVP": _functorch("TransformType.Jvp", LEVELS, "the same"),
    "VMAP": _functorch("TransformType.Vmap", LEVELS, "the same"),
    "maybe_get_level": _functorch("maybe_get_level", LEVELS, "a wrapper's level: levels"),
    "maybe_get_bdim": _functorch("maybe_get_bdim", LEVELS, "its batch dimension: levels"),
    "is_batchedtensor": _functorch("is_batchedtensor", LEVELS, "whether it has one: levels"),
    "add_batch_dim": _functorch("_add_batch_dim", LEVELS, "wraps a tensor: levels"),
    "VmapInfo": Internal(
        "torch._functorch.autograd_function.VmapInfo", BATCHING, "a batching rule's info: levels"
    ),
    "VmapInterpreter": Internal(
        "torch._functorch.pyfunctorch.VmapInterpreter", BATCHING, "a level of vmap: levels"
    ),
    "retrieve_current_functorch_interpreter": Internal(
        "torch._functorch.pyfunctorch.retrieve_current_functorch_interpreter",
        LEVELS,
        "the innermost level, to be left for a block: levels",
    ),
    "unwrap_if_dead": _functorch(
        "unwrap_if_dead", FUNCTION_OPS, "a tensor whose level has ended: levels"
    ),
    "wrap_for_grad": _functorch("_wrap_for_grad", FUNCTIONS, "a tensor at a level"),
    "unwrap_for_grad": _functorch("_unwrap_for_grad", FUNCTIONS, "one below it"),
    "FunctorchFunctionalizeAPI": Internal(
        "torch._subclasses.functional_tensor.FunctorchFunctionalizeAPI",
        FUNCTION_OPS,
        "a level of functionalize: function_ops",
    ),
    "FUNCTORCH_FRONT": _c(
        "DispatchKey.FuncTorchDynamicLayerFrontMode",
        FUNCTION_OPS,
        "the key at which a call meets the innermost level: function_ops",
    ),
    # Nodes of autograd, of one level each
    "SingleLevelFunction": Internal(
        "torch.autograd.function._SingleLevelFunction", NODES, "what Functions inherit: table.nodes"
    ),
    "enable_single_level_autograd_function": Internal(
        "torch._functorch.utils.enable_single_level_autograd_function",
        NODES,
        "a block in which one may be applied below transforms: table.nodes",
    ),
    "set_fwd_grad_enabled": Internal(
        "torch.autograd.forward_ad._set_fwd_grad_enabled", NODES, "a block: table.nodes"
    ),
    "is_fwd_grad_enabled": _c("_is_fwd_grad_enabled", NODES, "whether it is on: table.nodes"),
    "enable_inplace_requires_grad": Internal(
        "torch._functorch.eager_transforms.enable_inplace_requires_grad",
        NODES,
        "a block in which a level's tape may be begun: table.declared",
    ),
    # The Python dispatcher's tables. Attributes of operators: the functions below read them.
    "resolve_key": Internal("torch._ops.resolve_key", TRACES, "key to kernel's key: dispatch"),
    "_py_kernels": Internal(f"{_OP}.py_kernels", TRACES, "kernels in Python, by key: dispatch"),
    "_dispatch_cache": Internal(f"{_OP}._dispatch_cache", TRACES, "what it calls: dispatch"),
    "_op_dk": Internal(f"{_OP}._op_dk", TRACES, "calls the kernel of a key: dispatch"),
    "_python_key_table": Internal(
        f"{_OP}.python_key_table", ZEROS, "kernels in Python, by mode: dispatch"
    ),
    # Modes, and the one that records graphs
    "get_current_dispatch_mode": Internal(
        "torch.utils._python_dispatch._get_current_dispatch_mode", ZEROS, "the mode: dispatch"
    ),
    "pop_mode_temporarily": Internal(
        "torch.utils._python_dispatch._pop_mode_temporarily", ZEROS, "a block below it: dispatch"
    ),
    "ProxyTorchDispatchMode": Internal(
        "torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode", ZEROS, "it: dispatch"
    ),
    "get_proxy_slot": Internal(
        "torch.fx.experimental.proxy_tensor.get_proxy_slot", ZEROS, "a node: zero_tensors"
    ),
    "track_tensor": Internal(
        "torch.fx.experimental.proxy_tensor.track_tensor", ZEROS, "names a node: zero_tensors"
    ),
    # What Dynamo knows of an autograd.Function, and what a level does with one: functions. Names
    # down to "tree_map_only" were tried on torch 2.13.0 alone.
    "AutogradFunctionVariable": _dynamo("variables.misc.AutogradFunctionVariable", "it"),
    "_call_apply": _dynamo("variables.misc.AutogradFunctionVariable.call_apply", "traces a call"),
    "GetAttrVariable": _dynamo("variables.misc.GetAttrVariable", "its method `apply`"),
    "produce_trampoline_autograd_apply": _dynamo(
        "variables.misc.produce_trampoline_autograd_apply", "a call of `apply` in a graph"
    ),
    "VariableTracker": _dynamo("variables.base.VariableTracker", "a value in a trace"),
    "wrap_fx_proxy": _dynamo("variables.builder.wrap_fx_proxy", "a value of a graph"),
    "proxy_args_kwargs": _dynamo("utils.proxy_args_kwargs", "arguments in a graph"),
    "install_guard": _dynamo("guards.install_guard", "a condition of compiled code"),
    "GuardBuilder": _dynamo("guards.GuardBuilder", "its kinds"),
    "AttrSource": _dynamo("source.AttrSource", "where a value is from"),
    "GetItemSource": _dynamo("source.GetItemSource", "the same"),
    "GlobalStateSource": _dynamo("source.GlobalStateSource", "the same"),
    "unimplemented": _dynamo("exc.unimplemented", "breaks the graph, or is an error"),
    "TorchRuntimeError": _dynamo("exc.TorchRuntimeError", "what it raises of fake tensors"),
    # Since 2.14 in its place.
    "FakeTensorObservedException": Internal(
        "torch._dynamo.exc.FakeTensorObservedException", FUNCTIONS, "the same", optional=True
    ),
    "Unsupported": _dynamo("exc.Unsupported", "what it raises"),
    "FunctionMeta": Internal("torch.autograd.function.FunctionMeta", FUNCTIONS, "their class"),
    "custom_function_call": Internal(_CALL, FUNCTIONS, "asks for a level's rule"),
    "_functorch_table": Internal(f"{_CALL}.functorch_table", FUNCTIONS, "the rules"),
    "PYTHON_DISPATCHER": _c("DispatchKey.PythonDispatcher", FUNCTIONS, "the key of traces"),
    "is_included": _c("_dispatch_tls_is_dispatch_key_included", FUNCTIONS, "whether it is on"),
    # The rules themselves: autograd_function
    "FUNCTIONALIZE": _functorch("TransformType.Functionalize", FUNCTIONS, "a level's kind"),
    "current_level": _functorch("current_level", FUNCTIONS, "the innermost level's number"),
    "unwrap_batched": Internal("torch._functorch.vmap.unwrap_batched", FUNCTIONS, "below vmap"),
    "restore_vmap": Internal("torch._functorch.vmap.restore_vmap", FUNCTIONS, "over a batch"),
    "prefix_flattened": Internal(
        "torch.utils._pytree._broadcast_to_and_flatten", FUNCTIONS, "a dimension for each result"
    ),
    "tree_map_only": Internal("torch.utils._pytree.tree_map_only", FUNCTIONS, "of the tensors"),
    "FunctionalTensorMode": Internal(
        "torch._subclasses.functional_tensor.FunctionalTensorMode",
        FUNCTION_OPS,
        "the mode in which AOTAutograd traces: function_ops",
    ),
    # Libraries of kernels
    "has_kernel": _c(
        "_dispatch_has_kernel_for_dispatch_key", EAGER, "whether it is more than a fallback: eager"
    ),
    "_destroy": Internal("torch.library.Library._destroy", EAGER, "takes kernels out: eager"),
    # Normalization over several processes
    "AnyBatchNorm": Internal(
        "torch.nn.modules.batchnorm._BatchNorm", SYNC, "what batch norms inherit: norms.sync_batch"
    ),
    "all_gather": Internal(
        "torch.distributed._functional_collectives.all_gather_single_autograd",
        SYNC,
        "a collective that is traced and has a derivative: from 2.13 on",
        optional=True,
    ),
    "all_gather_before": Internal(
        "torch.distributed._functional_collectives.all_gather_tensor_autograd",
        SYNC,
        "the same on 2.11",
        optional=True,
    ),
    # Inductor
    "inductor_decompositions": Internal(
        "torch._inductor.decomposition.decompositions", TABLE, "its table: inductor_state"
    ),
    "fast_random_decomps": Internal(
        "torch._inductor.decomposition.fast_random_decomps",
        TABLE,
        "its cached copy of the table: inductor_state",
        optional=True,
    ),
    "inductor_config": Internal("torch._inductor.config", PASS, "its settings: inductor_state"),
    "inductor_settings": Internal(
        "torch._inductor.config._config", PASS, "the same, with their defaults: inductor_state"
    ),
    "_post_grad_custom_pre_pass": Internal(
        "torch._inductor.config.post_grad_custom_pre_pass", PASS, "a pass or passes: inductor_state"
    ),
    "CustomGraphPass": Internal(
        "torch._inductor.custom_graph_pass.CustomGraphPass", PASS, "a pass with a uuid: the same"
    ),
    "get_custom_graph_passes": Internal(
        "torch._inductor.custom_graph_pass.get_custom_graph_passes",
        PASS,
        "where there is one, a setting may hold several passes: from 2.13 on",
        optional=True,
    ),
}
