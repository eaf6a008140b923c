"""`neptrio import`: a model's file becomes a model folder that serves.

formats     what a file is: by its name and first bytes, without running anything of it
folder      writes the folder, has the server load it, asks it something, and tells what was found
"""
