// Types of tensor operations that a run and the static check share.
#pragma once

namespace metal {

// The threads that perform an operation on tensors together, and where one lies.
template <int Simdgroups>
struct execution_simdgroups {};
using execution_simdgroup = execution_simdgroups<1>;
struct execution_thread {};
struct tensor_inline {};

}  // namespace metal
