"""Between backward and the optimizer: gradient sums over ranks and the global gradient norm."""
