"""``inspect --report``: one self-contained HTML page that shows a checkpoint."""
