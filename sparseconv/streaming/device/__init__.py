"""What a streamed run does to a GPU beside computing: copies in and out, and its peak of memory."""
