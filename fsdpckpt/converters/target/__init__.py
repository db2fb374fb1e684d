"""What is written, decided once: ``target.decide`` makes the ``Decision`` that everything after it follows."""
