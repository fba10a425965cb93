"""Metal text, rewritten as C++."""
