"""What ``inspect``, ``diff``, ``verify``, ``open`` and ``units`` answer: a record of options in, a result out."""
