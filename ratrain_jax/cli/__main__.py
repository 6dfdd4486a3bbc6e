"""`python -m ratrain_jax.cli`: the command line where `ratrain` is not on the path."""

from ratrain_jax.cli import main

main()
