"""What others have written is the judge: their runtimes run what we write, and ours runs what they write."""
