"""From a traced train step to a verified program of lifecycle ops."""
