"""The numbers and pictures of the documents: written from the committed results, and measured anew."""
