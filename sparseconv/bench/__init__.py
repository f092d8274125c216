"""What sparseconv and its peers take, in time and memory: ``sparseconv bench``."""
