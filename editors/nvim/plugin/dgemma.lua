-- The commands; all else is loaded with the first of them.

vim.api.nvim_create_user_command("DgemmaFill", function()
  require("dgemma").fill()
end, { desc = "Fill every <FILL> of the buffer, or the gap at the cursor" })

vim.api.nvim_create_user_command("DgemmaEdit", function(given)
  require("dgemma").edit(given.line1, given.line2, given.args)
end, { nargs = "*", range = true, desc = "Change lines as told; without an instruction mend mistakes" })
