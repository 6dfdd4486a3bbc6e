"""What makes the paper's figures and ours differ: one sentence each, by the key that `Figure.cause` names."""

CAUSES = {
    "terms": (
        "Ours counts what the runtime holds beside the paper's terms: gradients in float32, the whole gradient of the layer"
        " that is being synchronised, the residuals of one recovered microbatch, the logits, and a margin of 2 %."
    ),
    "split": (
        "How the paper splits layers over stages is not published; this is the split that needs least, which puts fewer"
        " layers beside the embedding and the head."
    ),
    "depth": "The allocation is another one, for the reason of its own row, and its fastest depth with it.",
    "forward": (
        "Recovery costs a second forward on the compute lane: at 8.1 TFLOPS a cluster the paper's rate needs 81 % of the"
        " peak, above its best published kernel (70 %), and a faster clock makes up for it."
    ),
    "auto": (
        "auto saves what residuals memory holds, so that it needs less arithmetic than the recovery with which the clock"
        " was fitted, and with more clusters, whose shards are smaller, it saves more of them."
    ),
    "scaling": (
        "Every cluster has the same link whatever their number, so that a larger ring only adds latency: stragglers and"
        " contention are not modelled."
    ),
    "unpublished": (
        "Neither the clusters nor the tokens of this row are published; it is computed for the tokens of LLaMA-2-7B's."
    ),
    "clusters": (
        "The number of clusters is not published: ours at the other number that fits is within 5 % of the paper's."
    ),
    "ratrain": (
        "The number of clusters is not published, and neither that fits gives the paper's time at this clock; a quarter of"
        " the arithmetic is recovery's second forward."
    ),
    "tp-heavy": (
        "The layout of the paper's is not published: ours has 4 ranks, which exchange activations over 3.7 GB/s after every"
        " half of a layer, with nothing beside it."
    ),
    "zero3-heavy": (
        "Ours gathers beside the compute of the same layer and waits only where that is shorter; how much of it the paper's"
        " exposes is not published (serial, it would take up to 1.54 times as long)."
    ),
    "backward-checkpoint": (
        "Recovering behind the gradient takes the compute lane no longer than ahead of it, so that it costs only the"
        " pipeline's fill: 1.4 % at 256 microbatches and 16 stages, not a third."
    ),
    "tuned-pp-dp-zero": (
        "By our count all residuals fit at microbatches of one example, so that the tuned baseline saves them all and does a"
        " quarter less arithmetic; the paper says that saving all runs out of memory."
    ),
    "full-save": (
        "By our count all residuals fit at microbatches of one example, for attention keeps no scores and a stage holds at"
        " most as many microbatches as there are stages behind it; the paper's microbatch is not published."
    ),
    "forward recovery, step": (
        "1.33 = 8/6 is the gain if recovery were free; it takes its stage's compute lane, so that only the pipeline's bubble"
        " hides it: (m+P-1)·4/(4m+3(P-1)) at forward 1, backward 2, recovery 1."
    ),
    "update-prefetch, tail": (
        "Ours gathers each view only before the block that reads it, also without update-prefetch; the paper's next step"
        " waits for a stage's last view, as the row below does."
    ),
    "layerwise state, step": (
        "Without it a stage's whole synchronisation is exposed: once a step with zero=1, which is nothing to a large batch,"
        " after every microbatch with zero=2, which weighs more the faster the cores; the paper's batch is not published."
    ),
    "layerwise state, tail": (
        "Ours gathers each view only before the block that reads it; the paper's next step waits for a stage's last view,"
        " as the row below does."
    ),
    "layers": (
        "That tail grows with the layers of the stage that sets the pace: both of the paper's figures are those of 4.6 equal"
        " layers, and ours has another number of them, the embedding first."
    ),
}
