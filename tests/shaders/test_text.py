"""The text that MLX gets has the tokens of the files, on their lines, and no more."""

import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_marlin.backends import source
from mlx_marlin.backends.metal import source as metal_source
from mlx_marlin.backends.metal.source.compaction import lean, stripped
from mlx_marlin.emulator.language.rewrite import definitions
from mlx_marlin.emulator.language.tokens import Tokens
from mlx_marlin.weights.formats import LAYOUTS

FOLDER = source.shader_folder()
FILES = sorted(FOLDER.rglob("*.metal"))
BODIES = sorted((FOLDER / "kernels").glob("*.metal"))
LIBRARIES = [path.read_text() for path in sorted((FOLDER / "lib").glob("*.metal"))]
KERNELS = [
    *(
        metal_source.product_source(kernel, fused)
        for kernel in ("gemv", "gemm_register", "gemm_staged")
        for fused in (False, True)
    ),
    *(metal_source.reduce_source(fused) for fused in (False, True)),
    *map(metal_source.gather_source, (False, True)),
    metal_source.dequantize_source(),
    *map(metal_source.repack_source, LAYOUTS),
    *map(metal_source.routing_source, ("route", "combine")),
    *map(metal_source.block_source, ("rotate_heads", "add_norm")),
]

LIBRARIES_OF = {
    kernel: (
        *metal_source.WEIGHT,
        "epilogue",
        "tiling",
        *metal_source.DEPENDENCIES.get(kernel, ()),
        kernel,
    )
    for kernel in ("gemv", "gemm_register", "gemm_staged")
} | {
    "gather": (
        *metal_source.WEIGHT,
        "epilogue",
        "tiling",
        *metal_source.DEPENDENCIES["gemm_register"],
        "gemm_register",
        "gemv",
        "gather",
        "gate",
        "gated",
        "expert_epilogue",
    ),
    "dequantize": (*metal_source.WEIGHT, "dequantize"),
    "reduce": ("work", "epilogue", "reduce"),
    "pack": ("work", "repack"),
    "unpack": ("work", "repack"),
    "route": ("work", "routing"),
    "combine": ("work", "routing"),
    "rotate_heads": ("work", "heads"),
    "add_norm": ("work", "add_norm"),
}


def tokens_of_lines(text: str) -> list[list[str]]:
    """Returns the tokens of each line, as the emulator's tokenizer reads them."""
    tokens = Tokens(text)
    lines: list[list[str]] = [[]]
    for at in range(len(tokens)):
        if tokens.space(at):
            lines += [[] for _ in range(tokens.text(at).count("\n"))]
        else:
            lines[-1].append(tokens.text(at))
    return lines


def assert_same_lines(short: str, long: str) -> None:
    assert tokens_of_lines(short) == tokens_of_lines(long)
    assert short.count("\n") == long.count("\n")


@pytest.mark.parametrize(
    "path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_a_shader_keeps_each_token_on_its_line(path: Path) -> None:
    text = path.read_text(encoding="ascii")

    assert_same_lines(stripped(text), text)
    assert "//" not in stripped(text)
    assert not re.search(r"^[ \t]|[ \t]$|  ", stripped(text), re.MULTILINE)
    assert stripped(stripped(text)) == stripped(text)


@pytest.mark.parametrize("path", BODIES, ids=lambda path: path.stem)
def test_lines_of_files_stay_or_become_empty(path: Path) -> None:
    body = path.read_text(encoding="ascii")
    text = lean(LIBRARIES, body)

    kept, whole = text.split("\n"), stripped("\n".join(LIBRARIES)).split("\n")
    assert len(kept) == len(whole)
    pairs = list(zip(kept, whole, strict=True))
    assert all(line in ("", other) for line, other in pairs)
    assert any(line != other for line, other in pairs)
    assert lean([text], body) == text


def heads(text: str) -> list[tuple[str, str]]:
    """Returns names and heads of functions and classes, as the emulator finds them."""
    tokens = Tokens(text)
    found = [tokens.read(start, brace) for start, brace, _ in definitions(tokens)]
    names = [re.search(r"struct\s+(\w+)|(\w+)\(", head) for head in found]
    return [
        (name[1] or name[2], head)
        for name, head in zip(names, found, strict=True)
        if name
    ]


@pytest.mark.parametrize("text", KERNELS, ids=lambda text: text.name)
def test_a_kernel_has_the_definitions_that_it_can_use(text: source.Source) -> None:
    body = text.name.removeprefix("marlin_")
    kernel = body.removesuffix("_fused")
    files = [
        (FOLDER / "lib" / f"{name}.metal").read_text() for name in LIBRARIES_OF[kernel]
    ]
    whole = heads("\n".join(files))
    kept = Counter(
        name for name, _ in heads(text.header.removeprefix("namespace marlin {\n"))
    )
    words = Counter(re.findall(r"\w+", text.header + text.source))
    classes = {name for name, head in whole if "struct" in head}
    absent = "|".join(classes - {*kept}) or "$"
    usable = Counter(
        name for name, head in whole if not re.search(rf"\b({absent})\b", head)
    )

    assert kernel in kept or f"{kernel}_register" in kept
    for name in {name for name, _ in whole}:
        if name in kept:
            assert kept[name] == usable[name], f"overloads of {name} are missing"
            assert words[name] > kept[name], f"{name} is not used"
        else:
            assert name not in words


@pytest.mark.parametrize("kernel", ["gemv", "gemm_register", "gather"])
def test_functions_of_other_kernels_are_gone(kernel: str) -> None:
    texts = {
        "gemv": metal_source.product_source("gemv"),
        "gemm_register": metal_source.product_source("gemm_register"),
        "gather": metal_source.gather_source(),
    }

    assert "splits_of_element" in (FOLDER / "lib" / "work.metal").read_text()
    assert "splits_of_element" not in texts[kernel].header
    assert ("METAL_FUNC void gemv(" in texts[kernel].header) == (kernel == "gemv")


def test_the_texts_stay_small() -> None:
    sizes = {text.name: len(text.header) + len(text.source) for text in KERNELS}

    assert sizes["marlin_gemv"] < 27_300
    assert sizes["marlin_gemm_register"] < 29_950
    assert sizes["marlin_gather"] < 32_250


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int a = 1;  // one\n", "int a=1;\n"),
        ("  return x;\n", "return x;\n"),
        ("int/* a */b;", "int b;"),
        ("a /* 1\n 2 */ b", "a\nb"),
        ("a - -b + +c & &d", "a- -b+ +c& &d"),
        ("a / *p", "a/ *p"),
        ("x < -1 > > y", "x<-1> >y"),
        ("1 .x; 1. x; .5f * 2", "1 .x;1. x;.5f*2"),
        (". . .", ". . ."),
        ("0x1e + 1", "0x1e +1"),
        ('a = "// no  comment";  // "comment', 'a="// no  comment";'),
        ('"\\" // " + x', '"\\" // "+x'),
        ("'\"' + '/*' + '*/'", "'\"'+'/*'+'*/'"),
        ('L "a" "b" u', 'L "a" "b" u'),
        ("// a \\\n still a comment\nb", "\n\nb"),
        ("#define F(x)  x  + 1 // c\nF (2)", "#define F(x) x + 1\nF(2)"),
        ("#define F (x)\n", "#define F (x)\n"),
        ("#define F(x) \\\n    x + \\\n  1\ny", "#define F(x)\\\n x +\\\n 1\ny"),
        ("#define F /* a\n b */ 1\n c", "#define F\\\n 1\nc"),
        ("/* a */ #if X\n #endif", "#if X\n#endif"),
        ("a # b", "a#b"),
        ("in\\\nt  b", "in\\\nt b"),
        ("int \\\n  b", "int\\\n b"),
        ("\r\n\tx\r\n", "\nx\n"),
        ("/* open", ""),
        ("", ""),
    ],
)
def test_space_and_comments_go(text: str, expected: str) -> None:
    assert stripped(text) == expected
    assert stripped(expected) == expected


SMALL = """\
constant constexpr int A = 1;
constant int B[2] = {A, 2};
constant uint C(3);
template <typename T, bool FLAG = (1 > 0), typename U = vec<T, 2>>
struct Pair {
  T first;
  T sum() const { return first + other(first); }
};
template <>
struct Pair<half, true> { half only; };
template <typename T> struct Pair;
template <typename T> METAL_FUNC vec<T, 2> both(T a, int b = A) { return {a, T(b)}; }
METAL_FUNC float both(float a) { if (a > 0) { a = -a; } return a; }
METAL_FUNC float other(float a) { return a * B[1]; }
METAL_FUNC float unused(float a) { return a * C; }
using Word = uint;
using namespace metal;
typedef uint Old;
enum { RED, GREEN };
static_assert(RED == 0, "red");
struct Old made() { return {}; }
#ifdef LATE
METAL_FUNC int late() { return 1; }
#endif
METAL_FUNC int torn(
#ifdef LATE
    int a,
#endif
    int b) {
  return b;
}
METAL_FUNC int behind() { return 0; }
#ifdef LATE
METAL_FUNC int open(int a) {
#else
METAL_FUNC int open(float a) {
#endif
  return a;
}
METAL_FUNC int last() { return 0; }
"""
ALWAYS = {17, 18, 19, 20, 22, 24, *range(25, 32), *range(33, 41)}
"""Lines of SMALL that no use decides about."""


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("", set()),
        ("A", {1}),
        ("B", {1, 2}),
        ("x.C", {3}),
        ("both(1)", {1, 12, 13}),
        ("other", {1, 2, 14}),
        ("Pair<int> p;", {1, 2, *range(4, 12), 14}),
        ("unused(1)", {3, 15}),
        ("Word w", {16}),
        ("made()", {21}),
        ("behind()", {32}),
        ("late", {23}),
        ("// A\nstring = 'A' + \"A\";", set()),
        ("#define X A\n", {1}),
    ],
)
def test_what_a_body_uses_stays(body: str, lines: set[int]) -> None:
    kept = lean([SMALL], body).split("\n")

    whole = [*map(stripped, SMALL.split("\n"))]
    assert len(kept) == len(whole)
    assert {i + 1 for i, line in enumerate(kept) if line} == lines | ALWAYS
    assert all(line in ("", other) for line, other in zip(kept, whole, strict=True))


@pytest.mark.parametrize(
    "text",
    [
        "}int f(){return 1;}",
        "};int f(){return 1;",
        "int f(){",
        "template",
        "template\n",
        "<",
    ],
)
def test_unbalanced_text_stays(text: str) -> None:
    assert lean([text], "") == text


OVERLOADS = """\
struct Plain {};
struct Rich { int a; };
template <typename T> struct Wide { T a; };
int f(Plain) { return 0; }
int f(Rich rich, int b = deep(1)) { return deep(rich.a); }
int f(const device Wide<int>* wide) { return 2; }
template <typename Wide> int f(Wide wide, float b) { return 3; }
int deep(int a) { return a; }
Rich rich() { return {1}; }
"""


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("f(1, 2.0f)", {3, 6, 7}),
        ("f(Plain{})", {1, 3, 4, 6, 7}),
        ("f(rich())", {2, 3, *range(5, 10)}),
        ("auto a = rich();", {2, 9}),
        ("f(Wide<int>{})", {3, 6, 7}),
        ("Rich a; Plain b;", {1, 2}),
        ("", set()),
    ],
)
def test_overloads_for_classes_that_nothing_has_go(body: str, lines: set[int]) -> None:
    kept = lean([OVERLOADS], body)

    assert {i + 1 for i, line in enumerate(kept.split("\n")) if line} == lines
    assert lean([kept], body) == kept


def test_words_of_a_directive_are_used() -> None:
    text = "#define USED(x) called(x)\nint called(int x) { return x; }\n"

    assert "int called(int x){return x;}" in lean([text], "")


def test_files_see_each_other() -> None:
    files = ["int a() { return 1; }\n", "int b() { return a(); }\n"]

    assert lean(files, "b();") == "int a(){return 1;}\n\nint b(){return a();}\n"
    assert lean(files, "a();") == "int a(){return 1;}\n\n\n"


PARTS = [
    *("a", "b1", "_c", "1", "0x1eu", ".5f", "2e-3", "+", "-", "*", "/", "<", ">", "&"),
    *(
        "=",
        "!",
        "|",
        ":",
        ".",
        ",",
        ";",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        "->",
        "template",
    ),
    *(
        "struct",
        "using",
        "typedef",
        '"s // t"',
        '"\\""',
        "'\\''",
        "/* c ' */",
        '// d "\n',
    ),
    *(
        "/* e\nf */",
        "\n",
        "\n",
        " ",
        " ",
        "  ",
        "\t",
        "\n#if a  b\n",
        "\n#endif // g\n",
    ),
    "\n#define m(a) \\\n  a\n",
]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=40).map("".join)


def words_of(text: str) -> list[str]:
    """Returns the tokens of a text by a grammar of its own, without continuations."""
    text = re.sub(
        r'("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')|//[^\n]*|/\*.*?(?:\*/|\Z)',
        lambda found: found[1] or " " + "\n" * found[0].count("\n"),
        text,
        flags=re.S,
    )
    operators = r"<<=|>>=|<<|>>|&&|\|\||::|->\*?|\+\+|--|\.\.\.|[-+*/%&|^=!<>]=|[^\s\w]"
    number = r"\.?\d(?:[eEpP][+-]|[\w.])*"
    string = r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
    return re.findall(rf"\n|{string}|{number}|\w+|{operators}", text)


@given(TEXTS)
def test_any_text_keeps_its_tokens_and_lines(text: str) -> None:
    short = stripped(text)

    assert words_of(short) == words_of(text)
    assert stripped(short) == short
    assert short.count("\n") == text.count("\n")


@given(TEXTS, TEXTS)
def test_any_declarations_stay_whole_or_go(text: str, body: str) -> None:
    short = lean([text], body)

    assert short.count("\n") == text.count("\n")
    assert lean([short], body) == short
    words = words_of(stripped(text))
    rest = iter(words)
    assert all(word in rest for word in words_of(short))
