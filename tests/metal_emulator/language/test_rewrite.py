"""The emulator's front end changes words, never lines."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from metal_emulator.language.frontend import translate
from metal_emulator.language.rewrite import rewritten
from metal_emulator.language.tokens import Tokens

MARKS = [*"<>()[]{};,:=*&.#\"'\n", "::", "->", "//", "/*", "*/", "\\\n"]
TYPES = ["float4", "half2", "vec", "packed_vec", "T", "struct", "metal", "x", "y"]
KEYWORDS = ["threadgroup", "device", "constant", "thread", "static_cast", "return"]
DECLARATIONS = ["using", "typedef", "typename", "template", "namespace", "define"]
NUMBERS = ["1.0h", "3", "0x1f", "2bf"]
WORDS = [*MARKS, *TYPES, *KEYWORDS, *DECLARATIONS, *NUMBERS]
metal_like = st.lists(st.sampled_from(WORDS), max_size=40).map(" ".join)


@given(text=metal_like | st.text())
@example(text="threadgroup float4\n tile[2]\n [3], other[\n4];")
@example(text="float4 v(1,\n 2, 3, 4); (float4)\nx;")
@example(text="void f(device float* p) {\n}\nvoid f(threadgroup float* p) {\n}\n")
def test_every_line_stays_where_it_is(text: str) -> None:
    assert rewritten(text).count("\n") == text.count("\n")


@given(text=metal_like | st.text())
def test_tokens_put_together_give_the_text(text: str) -> None:
    assert "".join(token.text for token in Tokens(text)) == text


@pytest.mark.parametrize(
    ("metal", "cpp"),
    [
        ("y = float4(a, b);", "y = emu::make<float4>(a, b);"),
        ("y = vec<T, 4>(a);", "y = emu::make<vec<T, 4>>(a);"),
        ("y = metal::vec<T, 4>(a);", "y = emu::make<metal::vec<T, 4>>(a);"),
        ("y = (float4)x[i].v + z;", "y = emu::make<float4>(x[i].v) + z;"),
        ("y = (half2)(float2)f(x);", "y = emu::make<half2>(emu::make<float2>(f(x)));"),
        ("y = a > (float4)b;", "y = a > emu::make<float4>(b);"),
        ("float4 v(a, 2);", "float4 v = emu::make<float4>(a, 2);"),
        ("float4 f(float4 a, int b);", "float4 f(float4 a, int b);"),
        ("float4 f();", "float4 f();"),
        ("y = 1.5h + .5h + 2bf;", "y = 1.5_half + .5_half + 2_bfloat;"),
        ("y = 0x1bf + 0xCh;", "y = 0x1bf + 0xCh;"),
        ("y = p->float4(1);", "y = p->float4(1);"),
        ("auto y = (device float4*)(p);", "auto y = (device float4*)(p);"),
        ("s = sizeof(float4) * 2;", "s = sizeof(float4) * 2;"),
        ("threadgroup float* p = t;", "threadgroup float* p = t;"),
        ("void f(threadgroup float* p);", "void f(threadgroup float* p);"),
        ("f(thread float4 (&v)[4]);", "f(thread float4 (&v)[4]);"),
        ("f(float4 (thread &v)[4]);", "f(float4 (thread &v)[4]);"),
        ("device half2 (*p)[8] = q;", "device half2 (*p)[8] = q;"),
        ("y = float4(*p)[2];", "y = emu::make<float4>(*p)[2];"),
        ("y = static_cast<float4>(x);", "y = emu::cast<float4>(x);"),
        ("using P = float2; y = P(1, 2);", "using P = float2; y = emu::make<P>(1, 2);"),
        (
            "f(a[b[1]], float2(c[d[2]], 3));",
            "f(a[b[1]], emu::make<float2>(c[d[2]], 3));",
        ),
        ('// float4(1)\ns = "float4(1)";', '// float4(1)\ns = "float4(1)";'),
    ],
)
def test_only_what_clang_does_not_read_is_rewritten(metal: str, cpp: str) -> None:
    assert rewritten(metal) == cpp


def test_threadgroup_variables_become_references() -> None:
    found = rewritten("{ threadgroup vec<T, 4> x[2][N], y; }")

    assert "auto& x = emu::threadgroup_variable<vec<T, 4> [2][N]," in found
    assert "auto& y = emu::threadgroup_variable<vec<T, 4> ," in found


def test_instances_of_a_template_are_rewritten_once_and_keep_their_names() -> None:
    text = (
        "template <int N>\n[[kernel]] void k{0}(\n"
        "  device float4* k [[buffer(0)]]) {{\nk[0] = float4(N);\n}}\n"
        '\ntemplate [[host_name("k{0}")]] [[kernel]] decltype(k{0}<{0}>) k{0}<{0}>;\n'
    )
    before = rewritten.cache_info().misses

    three, four = (translate(f"k{n}", text.format(n)).text for n in (3, 4))

    assert rewritten.cache_info().misses == before + 1
    assert "void k3(" in three
    assert "k[0] = emu::make<float4>(N);" in three
    assert three.replace("3", "4") == four
