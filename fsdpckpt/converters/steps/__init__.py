"""The steps from what was read to what is written. ``steps.draft`` is what they pass on, ``steps.order`` lists them."""
