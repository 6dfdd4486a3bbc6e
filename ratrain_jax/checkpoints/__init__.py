"""Checkpoints of training runs: whole or not there, checked when read, and free of the layout they were saved under.

Terms.
    A checkpoint is the **state** after a **step**, and **extras**: what else a run must know to go on, such as where it is
    in its data. Orbax writes it, under another name until it is whole. It keeps each leaf as one array of the user's
    shape, whatever devices it lay on, a stacked leaf stacked; so it fits any stages, ranks and ZeRO stage, and plain JAX.
    Its **manifest** lists the leaves, and the files that hold them, each with a digest. A checkpoint is **damaged** if a file
    cannot be read, or has another digest.

In a run of several processes, process 0 alone has the folder (`store`). Leaves come to it, and go out from it, between it and one
other process at a time (`between`, `streams`), each process with what its own devices hold.
"""
