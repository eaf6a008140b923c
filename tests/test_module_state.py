"""Modules keep no state of a server: several servers may run in one process, each on a thread of its own.

What a module's variable holds, all servers of the process share, and their threads take turns at any Python instruction. So a
variable that code writes to while it runs belongs to a server (an object that it made), or to a thread. The few that
belong to the process are in ALLOWED, with the reason why no server notices another one through them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

A_CACHE = "kept results of a function of the whole text or object, which is compared in whole; changed under the GIL"
A_LOG = "ONNX Runtime has one function for all messages of a process; behind a lock"
A_TABLE = "filled while the module is imported"
NUMBERS = "only makes numbers that no two callers share"
OF_THE_INTERPRETER = "the interpreter has one garbage collector and one allocator"
OF_THE_PROCESS = "of the process, which has one of it, however many servers run in it"
OF_A_MODEL_PROCESS = "in a model's own process, which has one model"
NO_STATE = "the object has no attribute"
SPARES = "memory for reuse, none of whose old contents is ever visible; under the GIL"

ALLOWED = {
    "cext/backends/compiled/asked.pyx": {"running": OF_A_MODEL_PROCESS},
    "cext/backends/compiled/host.pyx": dict.fromkeys(("library", "running"), OF_A_MODEL_PROCESS),
    "cext/backends/compiled/inferred.pyx": dict.fromkeys(("library", "running"), OF_A_MODEL_PROCESS),
    "cext/backends/kernel/plan.pyx": {"_last_id": NUMBERS},
    "cext/backends/onnx/api.pyx": {
        "_ELEMENTS": A_TABLE,
        "_dropped": A_LOG,
        "_loaded": OF_THE_PROCESS,
        "_messages": A_LOG,
        "_messages_lock": A_LOG,
        "_waiting": A_LOG,
        "allocator": OF_THE_PROCESS,
        "cpu_memory": OF_THE_PROCESS,
        "env": OF_THE_PROCESS,
    },
    "cext/backends/onnx/session.pyx": {
        "_nothing": "the address of tensors without bytes; nobody writes there"
    },
    "cext/backends/python/tensors.pyx": dict.fromkeys(
        ("_measuring", "_most"),
        "counts of this interpreter, measured once when the module that asks is imported",
    ),
    "cext/codec/base64_text.pyx": {"VALUES": A_TABLE},
    "cext/codec/json_request.pyx": {"_known_texts": A_CACHE},
    "cext/codec/json_response.pyx": {"_printed": A_CACHE, "_seen": A_CACHE},
    "cext/codec/json_writer.pyx": {"_ESCAPE": A_TABLE},
    "cext/codec/number_text.pyx": {"exact_power": A_TABLE, "rounded_up": A_TABLE, "truncated": A_TABLE},
    "cext/codec/proto_request.pyx": {"_known_heads": A_CACHE},
    "cext/loop/socket_writer_core.pyx": {
        "_threads": "each thread has its own; received bytes are copied before the next receive()"
    },
    "cext/observe/trace.pyx": {"last_id": NUMBERS},
    "cext/observe/trace_block.pyx": {"HEAD_SIZES": A_TABLE, "PAIRS": A_TABLE},
    "cext/request/file_part.pyx": {"_n_spares": SPARES, "_spare_bytes": SPARES, "_spares": SPARES},
    "cext/request/infer_request.pyx": {"clock_ahead_ns": "tests move the clock of the process"},
    "cext/transport/http1/plain_head.pyx": {
        "_NAME": A_TABLE,
        "_PATH": A_TABLE,
        "_heads": A_CACHE,
    },
    "cext/transport/http1/states.pyx": {"_NEXT": A_TABLE},
    "src/neptrio/backends/kernel/device.py": {"neptrio.request.device_memory.pools": OF_THE_PROCESS},
    "src/neptrio/backends/python/bls.py": {"waits": "by instance, and an instance belongs to one server"},
    "src/neptrio/backends/python/environment.py": {"_digests": A_CACHE},
    "src/neptrio/backends/python/process.py": {
        "_alive": "what is ended when the process of the servers ends"
    },
    "src/neptrio/backends/python/environment_template.py": {"environment_templates": OF_THE_PROCESS},
    "src/neptrio/backends/python/template.py": {
        "template": "all that it forks is told by each call; behind a lock, and started again when it was killed"
    },
    "src/neptrio/codec/descriptors.py": {"_classes": A_CACHE},
    "src/neptrio/compat/tritonserver/metrics.py": {"_registries": "metrics of that interface name no server"},
    "src/neptrio/embedded/functions.py": {"_functions": "by number, which no two functions share"},
    "src/neptrio/loop/allocator.py": dict.fromkeys(("_loading", "_ours"), OF_THE_INTERPRETER),
    "src/neptrio/loop/collector.py": {"_ours": OF_THE_INTERPRETER},
    "src/neptrio/loop/process_ends.py": {
        "ends": "one thread of the process watches all children; each is told to whoever started it"
    },
    "src/neptrio/observe/current_span.py": {"_class": A_CACHE},
    "src/neptrio/observe/model_families.py": {"_texts": "by model version, which belongs to one server"},
    "src/neptrio/observe/spans.py": {
        "neptrio.observe.current_span.active": "spans are looked for from then on, also where there are none"
    },
    "src/neptrio/process_end.py": {"_served": OF_THE_PROCESS},
    "src/neptrio/request/foreign_memory.py": {"_owners": A_TABLE},
    "src/neptrio/scheduling/base.py": {"NO_SCHEDULER": NO_STATE},
    "src/neptrio/service/statistics.py": {"NOTHING": NO_STATE},
    "src/neptrio/transport/grpc/stream_responder.py": {"RESPONDER": NO_STATE},
    "src/neptrio/transport/http2/limits.py": {"GRPC": A_TABLE, "REST": A_TABLE},
    "src/neptrio/transport/grpc/status.py": {"_TRAILERS_OF_ALIKE": A_CACHE},
    "src/triton_python_backend_utils/_compiled_names.py": {"shared_memory": NO_STATE},
    "src/triton_python_backend_utils/_host.py": {"_default": OF_A_MODEL_PROCESS},
    "src/triton_python_backend_utils/_process/compiled_ring.py": {"preloaded": OF_A_MODEL_PROCESS},
    "src/neptrio_backends/pytorch/model.py": {"_shared": OF_A_MODEL_PROCESS},
    "src/neptrio_backends/transformers/model.py": {"_shared": OF_A_MODEL_PROCESS},
    "src/triton_python_backend_utils/_process/stop_signal.py": dict.fromkeys(
        ("_hooked", "_thread"), OF_A_MODEL_PROCESS
    ),
    "src/triton_python_backend_utils/_process/tracing.py": {"_provider": OF_A_MODEL_PROCESS},
}
CYTHON_VARIABLE = re.compile(
    r"^cdef (?!class |struct |enum|inline |extern |packed |fused |union )([^(=\n]+?)(\w+)((?:\[\w+\])*)\s*(?:=.*|#.*)?$"
)
C_VARIABLE = re.compile(r"^\s+static (?!const|inline|__thread)[^(\n]*?(\w+)(?:\[\w*\])*\s*(?:=[^=].*)?;")
MUTATORS = "append add appendleft clear discard extend insert pop popitem popleft remove setdefault update move_to_end"


def sources(folder: str, *suffixes: str) -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix in suffixes and "_proto" not in path.parts:
            yield str(path.relative_to(ROOT)), path.read_text()


def written_in_cython(text: str) -> set[str]:
    """The variables of a Cython module that its functions write to."""
    lines = text.split("\n")
    names = {found[2] for line in lines if (found := CYTHON_VARIABLE.match(line))}
    names |= {found[1] for line in lines if (found := re.match(r"(\w+)(?:: [^=]+)? = ", line))}
    names |= {found[1] for line in lines if (found := C_VARIABLE.match(line))}
    inside = "\n".join(line for line in lines if line.startswith("    "))  # functions, those of classes too
    written = {
        name
        for declared in re.findall(r"^ +global (.+)$", inside, re.MULTILINE)
        for name in declared.split(", ")
    }
    for name in names:
        word = rf"(?<![\w.]){name}"
        if re.search(
            rf"^ +{word}(?:\[[^\n]*\]|\.\w+)+ *[-+*/|&^]?=[^=]|&{name}\b|\bdel {name}\[|"
            rf"{word}\.(?:{'|'.join(MUTATORS.split())}|offer)\(",
            inside,
            re.MULTILINE,
        ):
            written.add(name)
    return written - set(re.findall(r"static __thread [^;\n]*?(\w+) = ", text))


def imported_modules(tree: ast.Module) -> dict[str, str]:
    """Of our modules, by the name that they have here."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                place = ROOT / "src" / node.module.replace(".", "/") / alias.name
                if place.with_suffix(".py").exists() or place.with_suffix(".pyi").exists():
                    found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            found |= {
                alias.asname: alias.name
                for alias in node.names
                if alias.asname and alias.name.startswith("neptrio.")
            }
    return found


def written_in_python(text: str) -> set[str]:
    """The variables that the functions of a Python module write to: its own, and MODULE.NAME of others of ours."""
    tree = ast.parse(text)
    modules = imported_modules(tree)
    mine: set[str] = set()
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    written: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {target.id for target in targets if isinstance(target, ast.Name)}
            mine |= names
            made = node.value
            if isinstance(made, ast.Call) and isinstance(made.func, ast.Name) and made.func.id in classes:
                written |= names  # an object of the module's own: its methods may write

    def variable(node: ast.expr, local: set[str]) -> str | None:
        if isinstance(node, ast.Name) and node.id in mine - local:
            return node.id
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in set(modules) - local
        ):
            return f"{modules[node.value.id]}.{node.attr}"
        return None

    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        declared = {
            name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names
        }
        local = {
            node.id
            for node in ast.walk(function)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        local |= {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
        local -= declared
        written |= declared
        for node in ast.walk(function):
            changed: ast.expr | None = None
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
                changed = node.value
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                changed = node if variable(node, local) else node.value
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in MUTATORS.split()
            ):
                changed = node.func.value
            name = None if changed is None else variable(changed, local)
            if name is not None:
                written.add(name)
    return written


def test_what_modules_keep_is_of_the_process_or_of_a_thread() -> None:
    found = {path: written_in_cython(text) for path, text in sources("cext", ".pyx")}
    found |= {path: written_in_python(text) for path, text in sources("src", ".py")}
    found = {path: names for path, names in found.items() if names}
    assert found == {path: set(names) for path, names in ALLOWED.items()}
