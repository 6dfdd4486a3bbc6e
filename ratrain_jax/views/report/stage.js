// Shows the bytes of the stage that was chosen.
const [source, at, top] = stages[Number(cb_obj.value)]
shown.data = {...source.data}
limit.data = {y: at}
plot.y_range.end = top
