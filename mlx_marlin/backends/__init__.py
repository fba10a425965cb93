"""Back ends: what runs our kernels, and what it takes to plan and launch them."""
