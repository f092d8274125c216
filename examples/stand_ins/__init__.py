"""Small generated sets in the layouts and file formats of the real ones, for tests and for a first look."""
