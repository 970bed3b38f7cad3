"""The command `import`: settings of other libraries as settings of ours."""
