"""All there is to see of a step, as one HTML file that opens from disk without a network.

The words and tables are HTML and are there without JavaScript too; the drawings are Bokeh's, whose scripts stand in the file.
"""

from ratrain_jax.views.report.page import write_report as write_report
