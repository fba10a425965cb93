"""Lines that break one rule of Metal each, and their good twins."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A kernel with a fault, and its good twin."""

    message: str  # What is said of the fault
    bad: str  # Line of the body with the fault
    good: str = ""  # The same without
    bad_header: str = ""  # Functions that it calls, likewise
    good_header: str | None = None  # If they differ

    @property
    def twin(self) -> tuple[str, str]:
        header = self.bad_header if self.good_header is None else self.good_header
        return self.good or self.bad, header


OF_DEVICE = "METAL_FUNC float first(const device float* p) { return p[0]; }\n"
OF_TILE = "METAL_FUNC float first(const threadgroup float* p) { return p[0]; }\n"
OBJECT = "struct Pair { float a; float get() const { return a; } };\n"
UNQUALIFIED = "without an address space"

MUTANTS = {
    "device for threadgroup": Mutant(
        "no matching function for call to 'first'\n"
        "    cannot pass pointer to address space 'device' as a pointer to address "
        "space 'threadgroup' in 1st argument",
        "v = first(x);",
        "v = first(tile);",
        OF_TILE,
    ),
    "threadgroup for device": Mutant(
        "no known conversion from 'threadgroup float[32]' to 'const device float *",
        "v = first(tile);",
        "v = first(x);",
        OF_DEVICE,
    ),
    "constant for device": Mutant(
        "to address space 'constant'", "v = first(few);", "v = first(x);", OF_DEVICE
    ),
    "one of two spaces": Mutant(
        "incompatible operand types ('const device float *' and 'threadgroup float *')",
        "v = (i > 3 ? x : tile)[i];",
        "v = i > 3 ? x[i] : tile[i];",
    ),
    "pointer into another space": Mutant(
        "cannot initialize a variable of type 'const threadgroup float *",
        "const threadgroup float* p = x; v = p[0];",
        "const threadgroup float* p = tile; v = p[0];",
    ),
    "parameter without a space": Mutant(
        f"pointer {UNQUALIFIED}",
        "v = first(x);",
        bad_header="METAL_FUNC float first(const float* p) { return p[0]; }\n",
        good_header=OF_DEVICE,
    ),
    "local pointer without a space": Mutant(
        f"pointer {UNQUALIFIED}",
        "float* p = &v; *p = 1;",
        "thread float* p = &v; *p = 1;",
    ),
    "reference without a space": Mutant(
        f"reference {UNQUALIFIED}",
        "float& r = v; r = 1;",
        "thread float& r = v; r = 1;",
    ),
    "reference to an array without a space": Mutant(
        f"reference {UNQUALIFIED}",
        "float a[4]; fill(a);",
        bad_header="METAL_FUNC void fill(float (&a)[4]) { a[0] = 1; }\n",
        good_header="METAL_FUNC void fill(thread float (&a)[4]) { a[0] = 1; }\n",
    ),
    "member without a space": Mutant(
        f"pointer {UNQUALIFIED}",
        "View<float> w = {x}; v = w.data[0];",
        bad_header="template <typename T> struct View { const T* data; };\n",
        good_header="template <typename T> struct View { const device T* data; };\n",
    ),
    "dependent type without a space": Mutant(
        f"pointer {UNQUALIFIED}",
        "v = first<Of>(x);",
        bad_header="struct Of { typedef float type; };\n"
        "template <typename T> float first(const typename T::type* p) { return *p; }\n",
        good_header="struct Of { typedef float type; };\n"
        "template <typename T> float first(const device typename T::type* p) "
        "{ return *p; }\n",
    ),
    "cast that drops the space": Mutant(
        "converts between mismatching address spaces",
        "v = *(thread float*)x;",
        "v = (*(const device float4*)x).x;",
    ),
    "reinterpret_cast to another space": Mutant(
        "reinterpret_cast from 'const device float *",
        "v = *reinterpret_cast<const threadgroup float*>(x);",
        "v = *reinterpret_cast<const device int*>(x);",
    ),
    "method of an object in device memory": Mutant(
        "method 'get' is for objects in thread memory, not for 'const device Pair'",
        "v = ((const device Pair*)x)->get();",
        bad_header=OBJECT,
        good_header=OBJECT.replace("get() const", "get() const device"),
    ),
    "write to an input": Mutant(
        "read-only variable is not assignable", "x[i] = 1;", "out[i] = 1;"
    ),
    "write to constant memory": Mutant(
        "read-only variable is not assignable", "few[0] = 1;", "tile[0] = few[0];"
    ),
    "pointer that forgets const": Mutant(
        "cannot initialize a variable of type 'device float *",
        "device float* p = x; p[0] = 1;",
        "device float* p = out; p[0] = 1;",
    ),
    "float becomes bfloat by itself": Mutant(
        "implicit conversion loses floating-point precision: 'float' to 'bfloat'",
        "bfloat b = v; v = b;",
        "bfloat b = bfloat(v); v = b;",
    ),
    "float becomes bfloat in one instance of a template": Mutant(
        "implicit conversion loses floating-point precision",
        "v = narrow<bfloat>(v);",
        "v = narrow<half>(v);",
        "template <typename T> float narrow(float f) { T t = f; return t; }\n",
    ),
    "float that bfloat holds exactly becomes bfloat by itself": Mutant(
        "implicit conversion loses floating-point precision: 'float' to 'bfloat'",
        "bfloat b = 0.5f; v = b + float(1.0bf);",
        "bfloat b = bfloat(0.5f); half h = 0.5f; v = b + h;",
    ),
    "array parameter without a space is in thread memory": Mutant(
        "no matching function for call to 'pick'",
        "v = pick(i, x);",
        bad_header="METAL_FUNC float pick(uint i, const float a[4]) { return a[i]; }\n",
        good_header=(
            "METAL_FUNC float pick(uint i, const device float a[4]) {\n"
            "  thread float b[2] = {a[i], 1};\n  return b[0];\n}\n"
            "METAL_FUNC float first(float b[2]) { return b[0]; }\n"
            "METAL_FUNC float mine() { float b[2] = {1, 2}; return first(b); }\n"
        ),
    ),
    "half becomes bfloat by itself": Mutant(
        "cannot initialize a variable of type 'thread bfloat'",
        "half h = 1.0h; bfloat b = h; v = b;",
        "half h = 1.0h; bfloat b = static_cast<bfloat>(h); v = b + 1.0bf;",
    ),
    "vector of too few elements": Mutant(
        "wrong number of elements for this vector",
        "v = float4(1, v, 3).x;",
        "v = float4(1, v, float2(3)).x;",
    ),
    "threadgroup variable with an initialiser": Mutant(
        "threadgroup variable 'sum' cannot have an initialiser",
        "threadgroup float sum = 0; v = sum;",
        "threadgroup float sum; v = sum;",
    ),
    "threadgroup variable in a function": Mutant(
        "threadgroup variable 'own' outside of a kernel's body",
        "v = shared(tile);",
        bad_header="METAL_FUNC float shared(threadgroup float* p) "
        "{ threadgroup float own[4]; return own[0] + p[0]; }\n",
        good_header=OF_TILE.replace("first(const", "shared("),
    ),
    "variable at program scope": Mutant(
        "program scope variable must reside in constant address space",
        "v = step_size;",
        bad_header="float step_size = 4;\n",
        good_header="constant float step_size = 4;\n",
    ),
    "constexpr at program scope": Mutant(
        "program scope variable must reside in constant address space",
        "v = step_size;",
        bad_header="constexpr int step_size = 4;\n",
        good_header="constant constexpr int step_size = 4;\n",
    ),
    "static variable in a function": Mutant(
        "address space",
        "static int count = 0; v = ++count;",
        "int count = 0; v = ++count;",
    ),
    "double": Mutant(
        "use of type 'double', which Metal does not have",
        "double d = v; v = d;",
        "float d = v * 1.0; v = d;",
    ),
    "unknown builtin": Mutant(
        "use of undeclared identifier 'simd_shuffle_xr'",
        "v = simd_shuffle_xr(v, ushort(1));",
        "v = simd_shuffle_xor(v, ushort(1));",
    ),
    "C++'s library": Mutant(
        "use of undeclared identifier 'std'",
        "v = std::max(v, 1.0f);",
        "v = max(v, 1.0f);",
    ),
    "simdgroup_load of another type": Mutant(
        "no matching function for call to 'simdgroup_load'",
        "simdgroup_half8x8 m; simdgroup_load(m, tile);",
        "simdgroup_float8x8 m; simdgroup_load(m, tile);",
    ),
    "simdgroup_store to constant memory": Mutant(
        "no matching function for call to 'simdgroup_store'",
        "simdgroup_float8x8 m; simdgroup_store(m, few);",
        "simdgroup_float8x8 m; simdgroup_store(m, out);",
    ),
    "simdgroup matrix of another size": Mutant(
        "simdgroup matrices are 8x8",
        "simdgroup_matrix<float, 4, 4> m;",
        "simdgroup_matrix<float, 8, 8> m;",
    ),
    "fragment as a name": Mutant(
        "'fragment' is a keyword of Metal and cannot be a name",
        "int fragment = 3; v = fragment;",
        "int fragments = 3; v = fragments;",
    ),
    "kernel as a parameter": Mutant(
        "'kernel' is a keyword of Metal and cannot be a name",
        "v = twice(2);",
        bad_header="METAL_FUNC int twice(int kernel) { return 2 * kernel; }\n",
        good_header="METAL_FUNC int twice(int kernels) { return 2 * kernels; }\n",
    ),
    "function of the library written again": Mutant(
        "call to 'fma' is ambiguous",
        "v = fma(v, v, v);",
        "v = fused(v, v, v);",
        "float fma(float a, float b, float c) { return a * b + c; }\n",
        "float fused(float a, float b, float c) { return a * b + c; }\n",
    ),
    "min of two types": Mutant(
        "call to 'min' is ambiguous", "v = min(i, 3);", "v = min(i, 3u);"
    ),
    "max of half and float": Mutant(
        "call to 'max' is ambiguous", "v = max(1.0h, v);", "v = max(float(1.0h), v);"
    ),
    "atomic in thread memory": Mutant(
        "no matching function for call to 'atomic_store_explicit'",
        "atomic_int a; atomic_store_explicit(&a, 1, memory_order_relaxed);",
        "threadgroup atomic_int a; atomic_store_explicit(&a, 1, memory_order_relaxed);",
    ),
    "atomic of a half": Mutant(
        "atomics are int, uint, float, bool or ulong",
        "threadgroup atomic<half> a;",
        "threadgroup atomic<float> a;",
    ),
    "virtual method": Mutant(
        "virtual functions are not supported",
        "Base b; v = b.a;",
        bad_header="struct Base { float a; virtual float get() { return a; } };\n",
        good_header="struct Base { float a; float get() { return a; } };\n",
    ),
    "as_type of another size": Mutant(
        "as_type needs types of equal size",
        "v = as_type<half>(v);",
        "v = as_type<half2>(v).x;",
    ),
}
