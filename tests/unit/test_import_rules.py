"""Rules the sources keep among themselves: who imports whom, sizes, paired memory-order points, honest ``__all__``."""

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("daemon", "client", "proto", "kernels", "cache_policy")

STANDARD = frozenset(sys.stdlib_module_names)
NUMBA = frozenset({"numba", "llvmlite"})
GPU = frozenset({"torch", "triton"})
GRPC = frozenset({"google", "grpc", "grpc_health"})

# In proto only these compile: everything else there is loaded where Numba's start-up time hurts.
PROTO_COMPILES = {"compiled", "atomics", "checksum", "ring"}

# What may be missing from a correct installation; a module that needs it may fail to import.
OPTIONAL = {"triton", "liburing", "transformers", "lm_eval"}

# Folders of the package that a folder may import, besides itself. None: anything but what is listed in FORBIDDEN.
MAY_IMPORT = {
    "proto": (),
    "cache_policy": ("proto",),
    "daemon": ("proto", "cache_policy"),
    "kernels": ("proto.layout", "proto.compiled", "proto.atomics"),
    "client": ("proto", "kernels", "cache_policy"),
}


@dataclass(frozen=True)
class Module:
    """One source file."""

    path: Path

    @property
    def where(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def top(self) -> str:
        return self.path.relative_to(ROOT).parts[0]

    @property
    def name(self) -> str:
        """As it is imported: ``strataflux.proto.ring``."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(("strataflux", *parts)).removesuffix(".__init__")

    @property
    def generated(self) -> bool:
        return self.path.stem.endswith(("_pb2", "_pb2_grpc"))

    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(), self.where)

    def imports(self) -> Iterator[str]:
        """Every import anywhere in the file; ``from a import b`` gives ``a.b``, a relative one starts with a dot."""
        for node in ast.walk(self.tree()):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = "." * node.level + (node.module or "")
                yield from (f"{base}.{alias.name}" for alias in node.names)

    def foreign(self) -> set[str]:
        """Top names of imports that are neither of this package nor of the standard library."""
        return {name.partition(".")[0] for name in self.imports()} - STANDARD - {"strataflux"}


def modules(*tops: str) -> list[Module]:
    """The source files of the given folders, or of all five."""
    return [Module(path) for top in tops or FOLDERS for path in sorted((ROOT / top).rglob("*.py"))]


def written() -> list[Module]:
    """What people wrote: the five folders without generated code, and the tests."""
    return [module for module in modules(*FOLDERS, "tests") if not module.generated]


def inside(name: str, allowed: str) -> bool:
    return f"{name}.".startswith(f"strataflux.{allowed}.")


# --- who imports whom -------------------------------------------------------------------------------------------------


def test_folders_import_only_what_the_design_allows() -> None:
    wrong = [
        f"{module.where}: {name}"
        for module in modules()
        for name in module.imports()
        if name.startswith("strataflux.")
        and name != "strataflux.__version__"
        and not any(inside(name, allowed) for allowed in (module.top, *MAY_IMPORT[module.top]))
    ]
    assert wrong == []


def test_package_is_imported_by_its_full_name() -> None:
    """A bare folder name finds another package elsewhere (proto-plus, kernels), and a relative one hides the folder."""
    wrong = [
        f"{module.where}: {name}"
        for module in modules(*FOLDERS, "tests")
        for name in module.imports()
        if name.startswith(".") or name.partition(".")[0] in FOLDERS
    ]
    assert wrong == []


def test_proto_needs_numpy_and_no_more() -> None:
    wrong = {}
    for module in modules("proto"):
        allowed = {"numpy"}
        if module.generated:
            allowed |= GRPC
        elif module.path.stem in PROTO_COMPILES:
            allowed |= NUMBA
        if extra := module.foreign() - allowed:
            wrong[module.where] = extra
    assert wrong == {}


def test_cache_policy_needs_numpy_and_numba_and_no_more() -> None:
    wrong = {
        module.where: extra for module in modules("cache_policy") if (extra := module.foreign() - NUMBA - {"numpy"})
    }
    assert wrong == {}


def test_daemon_names_no_torch() -> None:
    assert [module.where for module in modules("daemon") if module.foreign() & GPU] == []


def loaded_by(tops: tuple[str, ...]) -> set[str]:
    """Names in ``sys.modules`` of a new process after it imported every module of the given folders."""
    program = f"""
import importlib, json, sys
for name in json.loads(sys.stdin.read()):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in {OPTIONAL!r}:
            raise
print(json.dumps(list(sys.modules)))
"""
    names = [module.name for module in modules(*tops)]
    run = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(names), stdout=subprocess.PIPE, text=True, check=True
    )
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_daemon_loads_neither_torch_nor_client() -> None:
    loaded = loaded_by(("daemon", "proto", "cache_policy"))
    assert "strataflux.daemon" in loaded
    assert [name for name in loaded if name.partition(".")[0] in GPU or inside(name, "client")] == []


def test_client_loads_no_daemon() -> None:
    loaded = loaded_by(("client", "kernels"))
    assert "strataflux.client" in loaded
    assert [name for name in loaded if inside(name, "daemon")] == []


# --- memory order -----------------------------------------------------------------------------------------------------

LABEL = re.compile(r"SYNC: ([\w-]+)(?: \((\w+)\))?")


def test_every_publish_has_its_read() -> None:
    """``SYNC: name (publish)`` and ``SYNC: name (read)`` mark the two ends; a label without a role refers to them."""
    roles: dict[str, set[str]] = defaultdict(set)
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules("proto", "daemon", "client"):
        for line, text in enumerate(module.path.read_text().splitlines(), 1):
            for label, role in LABEL.findall(text):
                roles[label].add(role)
                places[label].append(f"{module.where}:{line}")
    lonely = {label: places[label] for label, seen in roles.items() if not {"publish", "read"} <= seen}
    assert lonely == {}


# --- sizes ------------------------------------------------------------------------------------------------------------

FILE_LINES = 400
FUNCTION_LINES = 50
TRITON_LINES = 80


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from ``def`` to the end; the contract in the docstring is not counted."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def limit(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    decorators = {ast.unparse(decorator).partition("(")[0] for decorator in function.decorator_list}
    return TRITON_LINES if "triton.jit" in decorators else FUNCTION_LINES


def test_files_fit_the_reader() -> None:
    sizes = {module.where: len(module.path.read_text().splitlines()) for module in written()}
    assert {where: lines for where, lines in sizes.items() if lines > FILE_LINES} == {}


def test_functions_fit_the_reader() -> None:
    wrong = {
        f"{module.where}:{node.lineno} {node.name}": length(node)
        for module in written()
        for node in ast.walk(module.tree())
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and length(node) > limit(node)
    }
    assert wrong == {}


# --- public names -----------------------------------------------------------------------------------------------------


def targets(node: ast.stmt) -> Iterator[ast.expr]:
    """What a statement binds, a tuple's items one by one; a type variable is an aid to checkers, not a name to use."""
    bound: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in {"TypeVar", "ParamSpec"}:
            return
        bound = node.targets
    elif isinstance(node, ast.AnnAssign):
        bound = [node.target]
    for target in bound:
        yield from target.elts if isinstance(target, ast.Tuple) else [target]


def defined(body: list[ast.stmt]) -> set[str]:
    """Names that a module's own statements define, also under ``if`` and ``try``."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        names |= {target.id for target in targets(node) if isinstance(target, ast.Name)}
        for branch in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With | ast.For):
                names |= defined(getattr(node, branch, []))
    return names


def exported(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        for target in targets(node):
            if isinstance(target, ast.Name) and target.id == "__all__" and isinstance(node, ast.Assign):
                names: list[str] = ast.literal_eval(node.value)
                return names
    return None


def test_all_equals_what_is_public() -> None:
    wrong = {}
    for module in modules():
        listed = exported(module.tree())
        if listed is None or module.generated:
            continue
        public = {name for name in defined(module.tree().body) if not name.startswith("_")}
        # A package may offer again what its modules define; every other module lists exactly its own public names.
        unknown = set() if module.path.name == "__init__.py" else set(listed) - public
        if public - set(listed) or unknown or len(listed) != len(set(listed)):
            wrong[module.where] = f"not listed {sorted(public - set(listed))}, not defined {sorted(unknown)}"
    assert wrong == {}
